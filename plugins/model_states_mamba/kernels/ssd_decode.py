"""Rows of one token through the state space of Mamba-2; the formula and the shapes are those of `ssd_scan`."""

from __future__ import annotations

import math
from typing import Final

import torch

from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import RecurrentStep
from model_states_mamba.kernels.ssd_parts import (
    Gated,
    SsdWeights,
    by_head,
    constants,
    gate_arguments,
    gated,
    num_pieces,
    time_step,
    time_steps,
)

_STATE_BYTES: Final = 16384  # that a program takes of several heads
_PROGRAMS: Final = 4096  # that are enough for an H200


def ssd_decode_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
) -> None:
    """One token of each row, all rows at once."""
    is_real = (step.final_rows > 0)[:, None, None]
    seconds, x = time_steps(dt, weights)[..., None], x.float()
    b, c = by_head(b, x.shape[1]), by_head(c, x.shape[1])
    state = pool[step.source_rows].float() * (seconds * weights.a[:, None]).exp()[..., None]
    state += (seconds * x)[..., None] * b[:, :, None]
    y.copy_((torch.einsum("thpn,thn->thp", state, c) + weights.d[:, None] * x) * is_real)
    # Padding rows have row 0 as their target, which stays zero.
    pool[step.final_rows] = (state * is_real[..., None]).to(pool.dtype)


@triton.jit
def _ssd_decode_kernel(
    x,
    dt,
    b,
    c,
    a,
    d,
    dt_bias,
    dt_low,
    dt_high,
    pool,
    query_start_loc,
    source_rows,
    final_rows,
    y,
    gate,
    gate_stride,
    norm_weight,
    squares,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
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
    IS_DECODE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    # Neighbours are heads of one row, or pieces of a head, whose states are neighbours too.
    PIECES: tl.constexpr = (HEAD_SIZE + BLOCK_P - 1) // BLOCK_P
    first_head, piece = tl.program_id(0) // PIECES * HEADS, tl.program_id(0) % PIECES
    row = tl.program_id(1).to(tl.int64)
    token = row
    if not IS_DECODE:
        token = tl.load(query_start_loc + row).to(tl.int64)
        if tl.load(query_start_loc + row + 1) - token != 1:
            return
    source = tl.load(source_rows + row).to(tl.int64)
    final = tl.load(final_rows + row).to(tl.int64)
    # Whatever is the same for all of a program is added to its pointers: what is left are small numbers.
    first = first_head * HEAD_SIZE + piece * BLOCK_P
    group = first_head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE
    h, p, n = tl.arange(0, HEADS), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    heads, channels = first_head + h, h[:, None] * HEAD_SIZE + p[None, :]
    num_channels = HEAD_SIZE - piece * BLOCK_P
    # Nothing of a padding row is read or kept, and its y is zero.
    has_p, has_n = (p < tl.where(final > 0, num_channels, 0))[None, :], n < STATE_SIZE
    has_state = has_p[:, :, None] & has_n[None, None, :]
    pool += first * STATE_SIZE
    pool_stride = tl.full((), NUM_HEADS * HEAD_SIZE * STATE_SIZE, tl.int64)
    place = channels[:, :, None] * STATE_SIZE + n[None, None, :]
    # The step before wrote the state: it may be read ahead of the convolution, which comes just before. Nothing that
    # the compiler might wait for comes ahead of it.
    state = tl.load(pool + source * pool_stride + place, mask=has_state, other=0.0)
    decay_rate, skip, bias = tl.load(a + heads), tl.load(d + heads), tl.load(dt_bias + heads)
    if PDL:
        gdc_wait()
    # All that is read is asked for before the state is written, since no read may pass a write.
    raw = tl.load(dt + token * dt_stride + heads, mask=h < tl.where(final > 0, HEADS, 0), other=0.0).to(
        tl.float32
    )
    xs = tl.load(x + (token * x_stride + first) + channels, mask=has_p, other=0.0).to(tl.float32)
    bs = tl.load(b + (token * b_stride + group) + n, mask=has_n, other=0.0).to(tl.float32)
    cs = tl.load(c + (token * c_stride + group) + n, mask=has_n, other=0.0).to(tl.float32)
    gates, factors = 0.0, 1.0
    if HAS_GATE:
        gates = tl.load(gate + (token * gate_stride + first) + channels, mask=has_p, other=0.0).to(tl.float32)
    if HAS_NORM:
        factors = tl.load(norm_weight + first + channels, mask=has_p, other=0.0).to(tl.float32)
    seconds = time_step(raw + bias, dt_low, dt_high)
    decay = tl.exp2(seconds * (decay_rate * 1.4426950408889634))
    added = (seconds[:, None] * xs)[:, :, None] * bs[None, None, :]
    state = state.to(tl.float32) * decay[:, None, None] + added
    tl.store(pool + final * pool_stride + place, state.to(pool.dtype.element_ty), mask=has_state)
    ys = tl.sum(state * cs[None, None, :], 2) + skip[:, None] * xs
    squares_at = squares + token * (NUM_HEADS * PIECES) + heads * PIECES + piece
    ys = gated(ys, gates, factors, squares_at, h < HEADS, HAS_GATE, HAS_NORM, GATE_LAST)
    target = y + (token * (NUM_HEADS * HEAD_SIZE) + first) + channels
    has_y = tl.broadcast_to((p < num_channels)[None, :], HEADS, BLOCK_P)
    tl.store(target, ys.to(y.dtype.element_ty), mask=has_y)


def heads_at_once(num_rows: int, num_heads: int, by_group: int, head_bytes: int) -> int:
    """Heads of one group whose states a program takes, a power of two: as many as leave enough programs.

    On an H200 a layer of 256 rows of 48 heads of 32 x 128 in bf16 took 73.9 us one by one, 72.9 in twos and 75.8 in
    fours, with heads of 64 x 128 134.5 and 139 in twos. With a copy in place in their stead it took 72.5 and 134.5.
    """
    most = min(_STATE_BYTES // head_bytes, num_rows * num_heads // _PROGRAMS)
    return math.gcd(by_group, 1 << most.bit_length() - 1) if most > 1 else 1


def launch_options(block: int, item_size: int) -> dict[str, int]:
    """Warps of a program that holds a state of `block` numbers of so many bytes, and registers of each thread.

    On an H200 64 x 128 took 101 us with 8 warps and 108 with 4, 32 x 128 took 52 with 2 and 55 with 4. More programs
    on a multiprocessor reach more of the memory's rate, so each is kept to the registers that it needs.
    """
    num_warps = min(block // 1024, 16) if block >= 8192 else max(block // 2048, 1)
    by_thread = block // (32 * num_warps)
    few = 64 if item_size <= 2 else 96
    return {"num_warps": num_warps, "maxnreg": few if by_thread <= 32 else 128}


def ssd_decode_triton(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
    after: Gated | None = None,
) -> None:
    """Launch one program for each row and some heads, or a piece of one head.

    In a decode step every row has one token or is padding; in others a program whose row has not one token ends at
    once, which is why those may not start ahead.
    """
    num_heads, head_size = pool.shape[1:3]
    sizes, pieces, num_rows = constants(pool, b, after), num_pieces(head_size), len(step.seq_lens)
    block = sizes["BLOCK_P"] * sizes["BLOCK_N"]
    by_group = num_heads // b.shape[1] if pieces == 1 else 1
    heads = heads_at_once(num_rows, num_heads, by_group, block * pool.element_size())
    _ssd_decode_kernel[(num_heads // heads * pieces, num_rows)](
        *(x, dt, b, c, weights.a, weights.d, weights.dt_bias, *weights.dt_limits, pool),
        step.query_start_loc,
        step.source_rows,
        step.final_rows,
        y,
        *gate_arguments(x, after),
        *(x.stride(0), dt.stride(0), b.stride(0), c.stride(0)),
        **sizes,
        HEADS=heads,
        IS_DECODE=step.is_decode,
        **launch_options(heads * block, pool.element_size()),
        **(programmatic_launch(x) if step.is_decode else {"PDL": False}),
    )
