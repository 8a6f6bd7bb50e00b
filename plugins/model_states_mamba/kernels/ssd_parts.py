"""What a scan and a single step of Mamba-2's state space (`ssd_scan`) have in common."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch.nn import functional

from model_states.kernels.act_mul import silu
from model_states.kernels.triton_import import tl, triton
from model_states_mamba.kernels.softplus import softplus

PIECE: Final = 64  # channels of a head that a program takes


class SsdWeights(NamedTuple):
    """Parameters of one layer, fp32 [H] each, and the limits of a time step."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float]


class Gated(NamedTuple):
    """What follows y: gate [num_tokens, D] with tokens apart, and a norm's weight [D], with D = H P.

    squares fp32 [num_tokens, H, `num_pieces`(P)] takes the sums of squares of each piece of a head: of y silu(gate), or
    of y where the gate comes after the norm. Without a norm, weight and squares are None.
    """

    gate: torch.Tensor
    weight: torch.Tensor | None
    gate_last: bool
    squares: torch.Tensor | None


def num_pieces(head_size: int) -> int:
    """Pieces of a head, each of one program."""
    return -(-head_size // PIECE)


def gate_torch(y: torch.Tensor, gated: Gated) -> None:
    """What `Gated` says, for every y."""
    factor = functional.silu(gated.gate.float()).view(y.shape)
    if gated.squares is not None:
        squared = (y.float() if gated.gate_last else y.float() * factor).square()
        whole = functional.pad(squared, (0, -y.shape[2] % PIECE)) if y.shape[2] > PIECE else squared
        gated.squares.copy_(whole.unflatten(2, (num_pieces(y.shape[2]), -1)).sum(-1))
    if gated.weight is not None:
        factor = factor * gated.weight.float().view(y.shape[1:])
    y.copy_(y.float() * factor)


def time_steps(dt: torch.Tensor, weights: SsdWeights) -> torch.Tensor:
    """softplus and clamp of dt, fp32 [num_tokens, H]."""
    return functional.softplus(dt.float() + weights.dt_bias).clamp(*weights.dt_limits)


def by_head(groups: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[n, G, N] -> fp32 [n, H, N]."""
    return groups.float().repeat_interleave(num_heads // groups.shape[1], 1)


@triton.jit
def time_step(raw, low, high) -> tl.tensor:
    """softplus and clamp of fp32 raw."""
    return tl.minimum(tl.maximum(softplus(raw), low), high)


@triton.jit
def gated(
    y,
    gates,
    factors,
    squares_at,
    valid,
    HAS_GATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_LAST: tl.constexpr,
) -> tl.tensor:
    """y [.., channels] with gates and a norm's factors; writes sums of squares over the channels where `valid`.

    Channels that are none have y = 0.
    """
    if HAS_GATE:
        before = y
        y *= silu(gates)
        if HAS_NORM:
            squared = before if GATE_LAST else y
            tl.store(squares_at, tl.sum(squared * squared, len(y.shape) - 1), mask=valid)
            y *= factors
    return y


def constants(pool: torch.Tensor, b: torch.Tensor, gated: Gated | None) -> dict[str, int | bool]:
    """Sizes and flags that both kernels take."""
    num_heads, head_size, state_size = pool.shape[1:]
    return {
        "NUM_HEADS": num_heads,
        "NUM_GROUPS": b.shape[1],
        "HEAD_SIZE": head_size,
        "STATE_SIZE": state_size,
        "BLOCK_P": max(min(triton.next_power_of_2(head_size), PIECE), 16),
        "BLOCK_N": max(triton.next_power_of_2(state_size), 16),
        "HAS_GATE": gated is not None,
        "HAS_NORM": gated is not None and gated.squares is not None,
        "GATE_LAST": gated is not None and gated.gate_last,
    }


def gate_arguments(
    x: torch.Tensor, gated: Gated | None
) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """gate, its stride, weight and squares; x stands where there is none."""
    if gated is None:
        return x, 0, x, x
    weight, squares = gated.weight, gated.squares
    return (
        gated.gate,
        gated.gate.stride(0),
        x if weight is None else weight,
        x if squares is None else squares,
    )
