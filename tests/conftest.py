"""Settings that must come before torch and triton are imported, and fixtures that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if TYPE_CHECKING:
    from support.drained import Drained

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter on a machine without a GPU; it is chosen when a kernel is decorated.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernel tests run: compiled on a GPU, interpreted on a CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def drained() -> Iterator[Drained]:
    """Engines that must give everything back: see `support.drained`."""
    from support.drained import drained_llms

    with drained_llms() as make:
        yield make
