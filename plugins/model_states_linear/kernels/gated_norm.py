"""The norm of each head, times a gate: out = weight y / sqrt(mean(y^2) + eps) * silu(gate).

y, out [num_tokens, H, V] contiguous, gate [num_tokens, H V] with tokens apart, weight [V]; the mean is that of a head.
All of it is fp32 and rounded once.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton


def gated_norm_torch(
    y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """The formula above."""
    wide = y.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    out.copy_(normed * functional.silu(gate.float()).view(y.shape))


@triton.jit
def _gated_norm_kernel(
    y,
    gate,
    gate_stride,
    weight,
    out,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    within = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (within < SIZE)
    place = head * SIZE + within
    factors = tl.load(weight + within, mask=within < SIZE, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(y + token * NUM_HEADS * SIZE + place, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None] * factors
    value *= gates * tl.sigmoid(gates)
    tl.store(out + token * NUM_HEADS * SIZE + place, value.to(out.dtype.element_ty), mask=inside)


def gated_norm_triton(
    y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Launch one program for each token and about a thousand of its numbers."""
    num_tokens, num_heads, size = y.shape
    block = triton.next_power_of_2(size)
    block_h = min(max(1024 // block, 1), triton.next_power_of_2(num_heads))
    _gated_norm_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        y,
        gate,
        gate.stride(0),
        weight,
        out,
        eps,
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK_H=block_h,
        BLOCK=block,
        **programmatic_launch(y),
    )


def gated_norm(
    y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Write `out`, which may be y."""
    op = gated_norm_triton if use_triton(y) else gated_norm_torch
    op(y, gate, weight, eps, out)
