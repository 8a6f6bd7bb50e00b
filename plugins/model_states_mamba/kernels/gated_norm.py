"""The norm after a scan: out = norm(y * silu(gate)) * weight, or norm(y) * weight * silu(gate), group by group.

norm(v) = v / sqrt(mean(v^2) + eps) over each group of `group_size` neighbours. y [num_tokens, D] contiguous, gate
[num_tokens, D] with tokens apart, weight [D]; out [num_tokens, D] contiguous. All of it is fp32 and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton


class GatedNorm(NamedTuple):
    """Parameters of one norm: weight [D], eps, numbers of a group, and whether the gate comes after it."""

    weight: torch.Tensor
    eps: float
    group_size: int
    gate_last: bool


def gated_norm_torch(y: torch.Tensor, gate: torch.Tensor, norm: GatedNorm, out: torch.Tensor) -> None:
    """The formula above."""
    wide, factor = y.float(), functional.silu(gate.float())
    if not norm.gate_last:
        wide = wide * factor
    groups = wide.unflatten(1, (-1, norm.group_size))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)
    wide = groups.flatten(1) * norm.weight.float()
    out.copy_(wide * factor if norm.gate_last else wide)


@triton.jit
def _gated_norm_kernel(
    y,
    gate,
    gate_stride,
    weight,
    out,
    eps,
    SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GATE_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    inside = within < GROUP_SIZE
    d = group * GROUP_SIZE + within
    factors = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(y + token * SIZE + d, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + d, mask=inside, other=0.0).to(tl.float32)
    factor = gates * tl.sigmoid(gates)
    if not GATE_LAST:
        value *= factor
    value *= tl.rsqrt(tl.sum(value * value, 0) / GROUP_SIZE + eps)
    value *= factors
    if GATE_LAST:
        value *= factor
    tl.store(out + token * SIZE + d, value.to(out.dtype.element_ty), mask=inside)


def gated_norm_triton(y: torch.Tensor, gate: torch.Tensor, norm: GatedNorm, out: torch.Tensor) -> None:
    """Launch one program for each token and group."""
    num_tokens, size = y.shape
    block = triton.next_power_of_2(norm.group_size)
    _gated_norm_kernel[(num_tokens, size // norm.group_size)](
        y,
        gate,
        gate.stride(0),
        norm.weight,
        out,
        norm.eps,
        SIZE=size,
        GROUP_SIZE=norm.group_size,
        GATE_LAST=norm.gate_last,
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
        **programmatic_launch(y),
    )


def gated_norm(y: torch.Tensor, gate: torch.Tensor, norm: GatedNorm, out: torch.Tensor) -> None:
    """Write `out`, which may be y."""
    op = gated_norm_triton if use_triton(y) else gated_norm_torch
    op(y, gate, norm, out)
