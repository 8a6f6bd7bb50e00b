"""Tiny models with linear layers that the tests share: each is made once a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from linear.tiny import save_tiny
from support.reference import Reference
from support.tiny_recurrent import recomputed_reference


class LinearModel:
    """A tiny checkpoint and its oracle, which computes every reference once."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, str(directory)
        self.model: Any = save_tiny(name, directory)
        self._reference = cache(self._compute)

    def reference(self, prompt: Sequence[int], max_tokens: int) -> Reference:
        return self._reference(tuple(prompt), max_tokens)

    def _compute(self, prompt: tuple[int, ...], max_tokens: int) -> Reference:
        return recomputed_reference(self.model, prompt, max_tokens)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LinearModel]:
    """Name of a `TINY` model -> its checkpoint and oracle."""
    return cache(lambda name: LinearModel(name, tmp_path_factory.mktemp(name)))
