"""A decode step's convolution and state space in one launch, so that states are on their way while rows are convolved.

The formulas are those of `causal_conv`, with SiLU, and `ssd_scan`: x, b and c, beside each other, are what the
convolution gives. A row's programs of the convolution count themselves in `arrived` when theirs is written; those of
its states ask for the states first, then wait for that count. No program waits for one that is started after it, as
long as programs start in the order of their numbers: a row's convolution comes _LEAD rows ahead of its states. The last
program of a row leaves its count at 0.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from model_states.kernels.causal_conv import causal_conv_torch, convolve_token
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import RecurrentStep
from model_states_mamba.kernels.ssd_decode import heads_at_once, launch_options, update_heads
from model_states_mamba.kernels.ssd_parts import PIECE, Gated, SsdWeights, constants, gate_arguments
from model_states_mamba.kernels.ssd_scan import ssd_scan_torch

_LEAD: Final = 2
_CHANNELS: Final = 4  # of a thread: one load for each input


class Convolution(NamedTuple):
    """x [num_tokens, D] with tokens apart, weight [D, W], bias [D] or None, and the pool of its states."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    pool: torch.Tensor


def conv_ssd_decode_torch(
    conv: Convolution,
    dt: torch.Tensor,
    num_groups: int,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
    after: Gated | None,
    arrived: torch.Tensor,
) -> None:
    """One after the other."""
    convolved = torch.empty_like(conv.x, memory_format=torch.contiguous_format)
    causal_conv_torch(conv.x, conv.weight, conv.bias, True, conv.pool, step, convolved)
    num_heads, head_size, state_size = pool.shape[1:]
    x, b, c = convolved.split([num_heads * head_size, num_groups * state_size, num_groups * state_size], 1)
    b, c = b.unflatten(1, (num_groups, state_size)), c.unflatten(1, (num_groups, state_size))
    ssd_scan_torch(x.unflatten(1, (num_heads, head_size)), dt, b, c, weights, pool, step, y, after)


@triton.jit
def _conv_ssd_decode_kernel(
    mixed,
    mixed_stride,
    conv_weight,
    d_stride,
    k_stride,
    conv_bias,
    conv_pool,
    convolved,
    arrived,
    dt,
    dt_stride,
    a,
    d,
    dt_bias,
    dt_low,
    dt_high,
    pool,
    source_rows,
    final_rows,
    y,
    gate,
    gate_stride,
    norm_weight,
    squares,
    CONV_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    LEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_LAST: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_conv = part < PARTS
    if not is_conv:
        row -= LEAD
    if (row < 0) | (row >= tl.num_programs(1) - LEAD):
        if PDL:
            gdc_wait()
        return
    source, final = tl.load(source_rows + row).to(tl.int64), tl.load(final_rows + row).to(tl.int64)
    convolved += row * CONV_SIZE
    if is_conv:
        convolve_token(
            *(
                mixed + row * mixed_stride,
                conv_weight,
                d_stride,
                k_stride,
                conv_bias,
                conv_pool,
                source,
                final,
            ),
            *(convolved, part * BLOCK_D + tl.arange(0, BLOCK_D), CONV_SIZE, WIDTH, HAS_BIAS, True, PDL),
        )
        tl.debug_barrier()  # all of it is written before it is counted
        tl.atomic_add(arrived + row, 1, sem="release")
        return
    first_head = (part - PARTS) * HEADS
    first = first_head * HEAD_SIZE
    group = NUM_HEADS * HEAD_SIZE + first_head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE
    h, p, n = tl.arange(0, HEADS), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    heads, channels = first_head + h, h[:, None] * HEAD_SIZE + p[None, :]
    # Nothing of a padding row is read or kept, and its y is zero.
    has_p, has_n = (p < tl.where(final > 0, HEAD_SIZE, 0))[None, :], n < STATE_SIZE
    pool += first * STATE_SIZE
    pool_stride = tl.full((), NUM_HEADS * HEAD_SIZE * STATE_SIZE, tl.int64)
    place = channels[:, :, None] * STATE_SIZE + n[None, None, :]
    has_state = has_p[:, :, None] & has_n[None, None, :]
    state = tl.load(pool + source * pool_stride + place, mask=has_state, other=0.0)
    decay_rate, skip, bias = tl.load(a + heads), tl.load(d + heads), tl.load(dt_bias + heads)
    is_real = h < tl.where(final > 0, HEADS, 0)
    is_channel = tl.broadcast_to((p < HEAD_SIZE)[None, :], HEADS, BLOCK_P)
    if PDL:
        gdc_wait()
    while tl.atomic_add(arrived + row, 0, sem="acquire") < PARTS:
        pass
    update_heads(
        *(state, convolved + first + channels, dt + row * dt_stride + heads),
        *(convolved + group + n, convolved + (group + NUM_GROUPS * STATE_SIZE) + n),
        *(gate + row * gate_stride + first + channels, norm_weight + first + channels),
        *(decay_rate, skip, bias, dt_low, dt_high, is_real, has_p, has_n, is_channel),
        *(pool + final * pool_stride, place),
        y + row * (NUM_HEADS * HEAD_SIZE) + first + channels,
        squares + row * NUM_HEADS + heads,
        *(HAS_GATE, HAS_NORM, GATE_LAST),
    )
    if tl.atomic_add(arrived + row, 1, sem="relaxed") == PARTS + NUM_HEADS // HEADS - 1:
        tl.store(arrived + row, 0)


def conv_ssd_decode_triton(
    conv: Convolution,
    dt: torch.Tensor,
    num_groups: int,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
    after: Gated | None,
    arrived: torch.Tensor,
) -> None:
    """Launch a row's programs beside each other: some channels each of the convolution, then some heads each."""
    num_rows, (size, width), (num_heads, _, state_size) = (
        len(step.seq_lens),
        conv.weight.shape,
        pool.shape[1:],
    )
    convolved = conv.x.new_empty(len(conv.x), size)
    sizes = constants(pool, convolved.new_empty(1, num_groups, state_size), after)
    block = sizes["BLOCK_P"] * sizes["BLOCK_N"]
    heads = heads_at_once(num_rows, num_heads, num_heads // num_groups, block * pool.element_size())
    options = launch_options(heads * block, pool.element_size())
    block_d = 32 * _CHANNELS * options["num_warps"]
    parts = triton.cdiv(size, block_d)
    _conv_ssd_decode_kernel[(parts + num_heads // heads, num_rows + _LEAD)](
        *(conv.x, conv.x.stride(0), conv.weight, *conv.weight.stride()),
        *(conv.weight if conv.bias is None else conv.bias, conv.pool, convolved, arrived, dt, dt.stride(0)),
        *(weights.a, weights.d, weights.dt_bias, *weights.dt_limits, pool, step.source_rows, step.final_rows),
        *(y, *gate_arguments(convolved, after)),
        CONV_SIZE=size,
        WIDTH=width,
        HAS_BIAS=conv.bias is not None,
        BLOCK_D=block_d,
        PARTS=parts,
        LEAD=_LEAD,
        **sizes,
        HEADS=heads,
        **options,
        **programmatic_launch(conv.x),
    )


def takes_one_launch(step: RecurrentStep, pool: torch.Tensor) -> bool:
    """Whether `conv_ssd_decode` serves a step with states in `pool`."""
    return step.is_decode and pool.shape[2] <= PIECE


def conv_ssd_decode(
    conv: Convolution,
    dt: torch.Tensor,
    num_groups: int,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
    after: Gated | None,
    arrived: torch.Tensor,
) -> None:
    """Write y and the states of both pools; arrived int32 [num_rows] is 0, and left so."""
    op = conv_ssd_decode_triton if use_triton(conv.x) else conv_ssd_decode_torch
    op(conv, dt, num_groups, weights, pool, step, y, after, arrived)
