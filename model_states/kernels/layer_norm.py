"""Layer norm of what a residual stream would be with the biases that were left out of it.

For every row of x [num_rows, size], in fp32 and rounded once,

    y   = x + shift
    out = (y - mean(y)) / sqrt(mean((y - mean(y))^2) + eps) * weight + bias

shift fp32 [size], or None for zeros; weight and bias [size]; out [num_rows, size] of x's dtype, contiguous.
A product that adds to a residual stream can leave its own bias out, so that it needs no pass over memory to add it:
shift is the sum of all that were left out so far. x may have any stride of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton

MAX_SIZE = 32768  # a program holds a row
_MANY_ROWS = 4096


@dataclass(frozen=True)
class LayerNorm:
    """A norm over rows that lack `shift` (see above)."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float
    shift: torch.Tensor | None = None


def layer_norm_torch(
    x: torch.Tensor,
    shift: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """The formula above."""
    y = x.float() if shift is None else x.float() + shift
    out.copy_(functional.layer_norm(y, y.shape[-1:], weight.float(), bias.float(), eps))


@triton.jit
def _layer_norm_kernel(
    x,
    shift,
    weight,
    bias,
    out,
    row_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    if HAS_SHIFT:
        added = tl.load(shift + cols, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    y = tl.load(x + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32) + added
    centred = tl.where(inside, y - tl.sum(y, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    tl.store(out + row * SIZE + cols, (centred * scale * w + b).to(out.dtype.element_ty), mask=inside)


def layer_norm_triton(
    x: torch.Tensor,
    shift: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Launch one program per row."""
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    # Measured on an H200: many rows keep the memory busy with few warps each, one row is over sooner with more.
    numbers_of_warp = 1024 if len(x) >= _MANY_ROWS else 512
    _layer_norm_kernel[(len(x),)](
        *(x, weight if shift is None else shift, weight, bias, out, x.stride(0), eps),
        SIZE=size,
        BLOCK=block,
        HAS_SHIFT=shift is not None,
        num_warps=min(max(block // numbers_of_warp, 1), 8),
        **programmatic_launch(x),
    )


def layer_norm(
    x: torch.Tensor,
    shift: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Write `out`."""
    if use_triton(x) and x.shape[1] <= MAX_SIZE:
        layer_norm_triton(x, shift, weight, bias, eps, out)
    else:
        layer_norm_torch(x, shift, weight, bias, eps, out)
