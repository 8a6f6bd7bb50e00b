"""Triton kernels of other packages beside ours: run without a choice of configurations, also by the interpreter."""

from __future__ import annotations

import builtins
import contextlib
import math
import sys
from collections.abc import Iterator

import pytest
import torch
from triton.runtime.autotuner import Autotuner, Heuristics


def hold_to_one_configuration(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let no autotuner of what is imported of `package` choose: an interpreter times nothing.

    The smallest blocks are what fits in fp32 too, and one kernel is compiled where there would be a dozen.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != package:
            continue
        for kernel in list(vars(module).values()):
            while isinstance(kernel, Autotuner | Heuristics):
                if isinstance(kernel, Autotuner):
                    smallest = min(kernel.configs, key=lambda config: math.prod(config.kwargs.values()))
                    monkeypatch.setattr(kernel, "configs", [smallest])
                kernel = kernel.fn


def need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches name the GPU of their tensors, which on a CPU is none."""
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())


def token_dtype(name: str, device: torch.device) -> torch.dtype:
    """float32 or bfloat16, in whose place the interpreter, which counts with the latter's bits, takes float16."""
    if name == "bfloat16" and device.type == "cpu":
        return torch.float16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class _Count(int):
    def to(self, _dtype: object) -> int:
        return self


def counted_range(*bounds: int) -> Iterator[int]:
    """The `range` of a kernel that casts its counter, which is a number of Python's in the interpreter."""
    return map(_Count, builtins.range(*map(int, bounds)))


def rounding(dtype: torch.dtype, *, tensor_cores: bool) -> float:
    """A distance that rounding alone may make between two ways to the same.

    It is that of the tokens' dtype; in float32 that of sums in another order, or of TF32 where the other's products of
    float32 run on tensor cores.
    """
    if dtype != torch.float32:
        return 2.5 * torch.finfo(dtype).eps
    return 5e-3 if tensor_cores else 3e-5


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())
