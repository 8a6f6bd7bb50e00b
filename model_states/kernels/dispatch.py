"""Which implementation a kernel wrapper takes: Triton where the tensor is on a GPU, torch elsewhere."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; it is optional."""
    return importlib.util.find_spec("triton") is not None


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether `tensor` should be handled by a compiled Triton kernel."""
    return tensor.is_cuda and has_triton()
