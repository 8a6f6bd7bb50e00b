"""Models that the engine's tests share: they are made once a session."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support.reference import Reference, greedy_reference
from support.tiny_models import save_tiny
from support.toy_model import ToyPlugin, ToyTable, save_toy


class TinyModel:
    """A tiny checkpoint and its oracle, which computes every reference once."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = str(directory)
        self.model: Any = save_tiny(name, directory)
        self._reference = lru_cache(None)(self._compute)

    def reference(self, prompt: Sequence[int], max_tokens: int) -> Reference:
        return self._reference(tuple(prompt), max_tokens)

    def _compute(self, prompt: tuple[int, ...], max_tokens: int) -> Reference:
        return greedy_reference(self.model, prompt, max_tokens)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Alternates full attention and a window of 8 tokens."""
    return TinyModel("gemma2", tmp_path_factory.mktemp("gemma2"))


@pytest.fixture(scope="session")
def toy_table() -> ToyTable:
    return ToyTable(50, seed=3)


@pytest.fixture(scope="session")
def toy_options(toy_table: ToyTable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of `drained` for the toy of `toy_table`."""
    directory = save_toy(tmp_path_factory.mktemp("toy"), 50)
    return {"model": directory, "plugins": [ToyPlugin(toy_table)], "device": "cpu", "block_size": 4}
