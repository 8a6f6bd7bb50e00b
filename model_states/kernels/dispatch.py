"""Which implementation a kernel wrapper takes: Triton where the tensor is on a GPU, torch elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

_twins_only: ContextVar[bool] = ContextVar("twins_only", default=False)


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; it is optional."""
    return importlib.util.find_spec("triton") is not None


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether `tensor` should be handled by a compiled Triton kernel."""
    return tensor.is_cuda and has_triton() and not _twins_only.get()


@contextmanager
def torch_twins() -> Iterator[None]:
    """Inside, this thread's calls take the torch twin everywhere: right, slow, and nothing is compiled for it."""
    token = _twins_only.set(True)
    try:
        yield
    finally:
        _twins_only.reset(token)
