"""Rows of several tokens through the state space of Mamba-2 (`ssd_scan`), in two kernels.

The first walks each row and leaves, beside the states that are kept, the one that every chunk starts from, and two
numbers of every token; the second takes all chunks at once. Chunk k of a row, counted from where the row begins, has
the row's first slot + k of starts [num_slots, H, P, N], which is not written where a row begins with nothing.

Decays are powers of two: with l the sum of s a / log(2) over a chunk's tokens up to t, decays [num_tokens, H] holds
l[t] and leads [num_tokens, H] l[t] - log2(s[t]), so that t gathers 2^(decays[t] - leads[u]) (c[t] . b[u]) x[u].
"""

from __future__ import annotations

import math
from typing import Final

import torch

from model_states.kernels.state_chunks import chunk_bounds, chunk_targets, row_chunks
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import RecurrentStep
from model_states_mamba.kernels.ssd_parts import (
    Gated,
    SsdWeights,
    constants,
    gate_arguments,
    gated,
    num_pieces,
    time_step,
)

_CHUNK: Final = 64
# Heads that a program of the second kernel takes in turn, and those whose inputs are on their way.
_HEADS, _STAGES = 6, 3
_PIECE_N: Final = 128  # columns of a state that a program of the first kernel takes


def _num_slots(num_tokens: int, num_rows: int, chunk: int) -> int:
    """Slots for any rows of so many tokens in all."""
    return num_tokens // chunk + 2 * num_rows


@triton.jit
def _first_slot(start, row, CHUNK: tl.constexpr) -> tl.tensor:
    """Slot of a row's first chunk, from its first token: n tokens lie in at most n // CHUNK + 2 chunks."""
    return start // CHUNK + 2 * row


@triton.jit
def _ssd_states_kernel(
    x,
    dt,
    b,
    a,
    dt_bias,
    dt_low,
    dt_high,
    pool,
    query_start_loc,
    seq_lens,
    source_rows,
    final_rows,
    scratch_rows,
    block_table,
    block_table_stride,
    starts,
    decays,
    leads,
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    # A row of one token is `_ssd_decode_kernel`'s.
    if num_tokens > 1:
        NUM_PIECES_N: tl.constexpr = (STATE_SIZE + BLOCK_N - 1) // BLOCK_N
        first_p = tl.program_id(2) // NUM_PIECES_N * BLOCK_P
        first_n = tl.program_id(2) % NUM_PIECES_N * BLOCK_N
        p, n, t = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
        has_p, has_n = p < HEAD_SIZE - first_p, n < STATE_SIZE - first_n
        has_state = has_p[:, None] & has_n[None, :]
        channel = head * HEAD_SIZE + first_p
        column = head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE + first_n
        place = p[:, None] * STATE_SIZE + n[None, :]
        pool_stride = tl.full((), NUM_HEADS * HEAD_SIZE * STATE_SIZE, tl.int64)
        pool += channel * STATE_SIZE + first_n
        starts += channel * STATE_SIZE + first_n
        end = tl.load(seq_lens + row)
        computed = end - num_tokens
        source = tl.load(source_rows + row).to(tl.int64)
        final = tl.load(final_rows + row)
        scratch = tl.load(scratch_rows + row)
        rate, bias = tl.load(a + head) * 1.4426950408889634, tl.load(dt_bias + head)
        state = tl.load(pool + source * pool_stride + place, mask=has_state, other=0.0).to(tl.float32)
        first_slot = _first_slot(start, row, CHUNK) - computed // CHUNK
        unit, num_chunks = row_chunks(computed, end, scratch, CHUNK)
        # A row with drafts goes token by token, but its outputs come in chunks too: the chunk's decay so far.
        before = 0.0
        for k in range(num_chunks):
            first, last = chunk_bounds(computed, end, unit, k)
            begin = (start + first - computed).to(tl.int64)
            has_t = t < last - first
            raw = tl.load(dt + (begin * DT_STRIDE + head) + t * DT_STRIDE, mask=has_t, other=0.0)
            x_at = x + (begin * X_STRIDE + channel) + t[:, None] * X_STRIDE + p[None, :]
            xs = tl.load(x_at, mask=has_t[:, None] & has_p[None, :], other=0.0)
            b_at = b + (begin * B_STRIDE + column) + t[:, None] * B_STRIDE + n[None, :]
            bs = tl.load(b_at, mask=has_t[:, None] & has_n[None, :], other=0.0)
            if (k > 0) & (first % CHUNK == 0) | (k == 0) & (source > 0):
                slot = (first_slot + first // CHUNK).to(tl.int64)
                tl.store(
                    starts + slot * pool_stride + place, state.to(starts.dtype.element_ty), mask=has_state
                )
            seconds = tl.where(has_t, time_step(raw.to(tl.float32) + bias, dt_low, dt_high), 0.0)
            decay = tl.cumsum(seconds * rate, 0)
            total = tl.sum(seconds * rate, 0)
            # A time step of 0 has no logarithm: one of 2^-123 adds nothing either.
            lead = decay - tl.log2(tl.maximum(seconds, 1e-37))
            before = tl.where(first % CHUNK == 0, 0.0, before)
            token = (begin * NUM_HEADS + head) + t * NUM_HEADS
            tl.store(decays + token, before + decay, mask=has_t)
            tl.store(leads + token, before + lead, mask=has_t)
            before += total
            left = (xs.to(tl.float32) * tl.exp2(total - lead)[:, None]).to(xs.dtype)
            state = tl.dot(tl.trans(left), bs, state * tl.exp2(total), input_precision="ieee")
            table = block_table + row.to(tl.int64) * block_table_stride
            own, block = chunk_targets(computed, end, last, final, scratch, table, BLOCK_SIZE)
            kept = state.to(pool.dtype.element_ty)
            if own > 0:
                tl.store(pool + own * pool_stride + place, kept, mask=has_state)
            if block > 0:
                tl.store(pool + block * pool_stride + place, kept, mask=has_state)


@triton.jit
def _row_of_slot(slot, query_start_loc, num_rows, CHUNK: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The last row whose first slot is not behind `slot`."""
    row = -1
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
        is_before = (_first_slot(starts, rows, CHUNK) <= slot) & (rows < num_rows)
        row += tl.sum(is_before.to(tl.int32), 0)
    return row


@triton.jit(do_not_specialize=["num_rows"])
def _ssd_outputs_kernel(
    x,
    b,
    c,
    d,
    query_start_loc,
    seq_lens,
    source_rows,
    num_rows,
    starts,
    decays,
    leads,
    y,
    gate,
    GATE_STRIDE: tl.constexpr,
    norm_weight,
    squares,
    X_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_LAST: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    first_head, slot = tl.program_id(0) * HEADS, tl.program_id(1)
    row = _row_of_slot(slot, query_start_loc, num_rows, CHUNK, 256)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    end = tl.load(seq_lens + row)
    source = tl.load(source_rows + row)
    computed = end - num_tokens
    k = slot - _first_slot(start, row, CHUNK)
    first, last = chunk_bounds(computed, end, CHUNK, k)
    if (num_tokens > 1) & (first < end):
        first_p = tl.program_id(2) * BLOCK_P
        p, n, t = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
        num_channels = HEAD_SIZE - first_p
        has_p, has_n, has_t = p < num_channels, n < STATE_SIZE, t < last - first
        has_x, has_b = has_t[:, None] & has_p[None, :], has_t[:, None] & has_n[None, :]
        column = first_head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE
        begin = (start + first - computed).to(tl.int64)
        c_at = c + (begin * C_STRIDE + column) + t[:, None] * C_STRIDE + n[None, :]
        cs = tl.load(c_at, mask=has_b, other=0.0)
        b_at = b + (begin * B_STRIDE + column) + t[:, None] * B_STRIDE + n[None, :]
        bs = tl.load(b_at, mask=has_b, other=0.0)
        # The same for all heads of a group; nothing comes from later tokens.
        both = tl.dot(cs, tl.trans(bs), input_precision="ieee")
        both = tl.where(t[:, None] >= t[None, :], both, 0.0)
        has_start = p < tl.where((k > 0) | (source > 0), num_channels, 0)
        for i in tl.range(0, HEADS, num_stages=STAGES):
            head = first_head + i
            channel = head * HEAD_SIZE + first_p
            x_at = x + (begin * X_STRIDE + channel) + t[:, None] * X_STRIDE + p[None, :]
            xs = tl.load(x_at, mask=has_x, other=0.0)
            state_at = starts + (slot.to(tl.int64) * NUM_HEADS * HEAD_SIZE + channel) * STATE_SIZE
            state_at += p[:, None] * STATE_SIZE + n[None, :]
            state = tl.load(state_at, mask=has_start[:, None] & has_n[None, :], other=0.0)
            token = (begin * NUM_HEADS + head) + t * NUM_HEADS
            decay = tl.load(decays + token, mask=has_t, other=0.0)
            lead = tl.load(leads + token, mask=has_t, other=0.0)
            gates, factors, skip = 0.0, 1.0, tl.load(d + head)
            if HAS_GATE:
                gate_at = gate + (begin * GATE_STRIDE + channel) + t[:, None] * GATE_STRIDE + p[None, :]
                gates = tl.load(gate_at, mask=has_x, other=0.0).to(tl.float32)
            if HAS_NORM:
                factors = tl.load(norm_weight + channel + p, mask=has_p, other=0.0).to(tl.float32)[None, :]
            ys = tl.dot(cs, tl.trans(state), input_precision="ieee") * tl.exp2(decay)[:, None]
            # Large for later tokens, of which there is nothing: infinity times nothing would be no number.
            gathered = both * tl.exp2(tl.minimum(decay[:, None] - lead[None, :], 100.0))
            ys = tl.dot(gathered.to(xs.dtype), xs, ys, input_precision="ieee")
            ys += skip * xs.to(tl.float32)
            squares_at = squares + ((begin + t) * NUM_HEADS + head) * tl.num_programs(2) + tl.program_id(2)
            ys = gated(ys, gates, factors, squares_at, has_t, HAS_GATE, HAS_NORM, GATE_LAST)
            Y_STRIDE: tl.constexpr = NUM_HEADS * HEAD_SIZE
            target = y + (begin * Y_STRIDE + channel) + t[:, None] * Y_STRIDE + p[None, :]
            tl.store(target, ys.to(y.dtype.element_ty), mask=has_x)


def ssd_chunks_triton(
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
    """Launch a program for each row, head and piece of a state, then one for each chunk, head and piece of a head."""
    num_rows, (num_heads, head_size, state_size) = len(step.seq_lens), pool.shape[1:]
    chunk = min(_CHUNK, step.block_size)
    num_slots = _num_slots(len(x), num_rows, chunk)
    starts = x.new_empty(num_slots, num_heads, head_size, state_size)
    decays, leads = x.new_empty(2, len(x), num_heads, dtype=torch.float32)
    sizes = constants(pool, b, after)
    flags = {name: sizes.pop(name) for name in ("HAS_GATE", "HAS_NORM", "GATE_LAST")}
    sizes |= {"CHUNK": chunk, "BLOCK_T": max(chunk, 16)}
    block_n = min(sizes["BLOCK_N"], _PIECE_N)
    _ssd_states_kernel[(num_rows, num_heads, num_pieces(head_size) * triton.cdiv(state_size, block_n))](
        *(x, dt, b, weights.a, weights.dt_bias, *weights.dt_limits, pool),
        step.query_start_loc,
        step.seq_lens,
        step.source_rows,
        step.final_rows,
        step.scratch_rows,
        step.block_table,
        step.block_table.stride(0),
        *(starts, decays, leads),
        *(x.stride(0), dt.stride(0), b.stride(0)),
        **{**sizes, "BLOCK_N": block_n},
        BLOCK_SIZE=step.block_size,
        num_stages=2,
    )
    heads = math.gcd(num_heads // b.shape[1], _HEADS)
    _ssd_outputs_kernel[(num_heads // heads, num_slots, num_pieces(head_size))](
        *(x, b, c, weights.d),
        step.query_start_loc,
        step.seq_lens,
        step.source_rows,
        num_rows,
        *(starts, decays, leads),
        y,
        *gate_arguments(x, after),
        *(x.stride(0), b.stride(0), c.stride(0)),
        **sizes,
        **flags,
        HEADS=heads,
        STAGES=_STAGES,
    )
