"""Tiny models with linear layers that the tests share: each is made once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from linear.tiny import save_tiny
from support.recurrent_exact import TinyRecurrent


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyRecurrent]:
    """Name of a `TINY` model -> its checkpoint and oracle."""
    return cache(lambda name: TinyRecurrent(name, tmp_path_factory.mktemp(name), save_tiny))
