"""Rows of several tokens through the state space of Mamba-2 (`ssd_scan`), in three kernels.

The first computes two numbers of every token. The second walks each row and leaves, beside the states that are kept,
the one that every chunk starts from; the third takes all chunks at once. Chunk k of a row, counted from where the row
begins, has the row's first slot + k of starts [num_slots, H, P, N], which is not written where a row begins with
nothing.

Decays are powers of two: with l the sum of s a / log(2) over a chunk's tokens up to t, decays [H, num_tokens] holds
l[t] and time_steps [H, num_tokens] s[t], so that t gathers 2^(l[t] - l[u]) s[u] (c[t] . b[u]) x[u]. To add a logarithm
of s[u] to l[u] would save the product, but l may be large: what a token gives to itself must not be rounded with it.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from model_states.kernels.state_chunks import (
    chunk_bounds,
    chunk_of_slot,
    chunk_targets,
    first_slot,
    num_slots,
    row_chunks,
)
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
_PROGRAMS: Final = 256  # two of them fill a multiprocessor of an H200
_DECAY_HEADS: Final = 16  # that a program of the first kernel takes
_PIECE_N: Final = 128  # columns of a state that a program of the second kernel takes


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _ssd_decays_kernel(
    dt,
    a,
    dt_bias,
    dt_low,
    dt_high,
    query_start_loc,
    seq_lens,
    num_rows,
    decays,
    time_steps,
    num_tokens,
    DT_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    # A row of one token is `_ssd_decode_kernel`'s.
    _, _, begin, count = chunk_of_slot(tl.program_id(0), query_start_loc, seq_lens, num_rows, CHUNK, 2)
    if count > 0:
        t, h = tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        has_t, has_h = (t < count)[:, None], h < NUM_HEADS
        rate = tl.load(a + h, mask=has_h, other=0.0) * 1.4426950408889634
        bias = tl.load(dt_bias + h, mask=has_h, other=0.0)
        dt_at = dt + begin * DT_STRIDE + t[:, None] * DT_STRIDE + h[None, :]
        raw = tl.load(dt_at, mask=has_t & has_h[None, :], other=0.0).to(tl.float32)
        seconds = tl.where(has_t, time_step(raw + bias[None, :], dt_low, dt_high), 0.0)
        decay = tl.cumsum(seconds * rate[None, :], 0)
        place = h.to(tl.int64)[None, :] * num_tokens + begin + t[:, None]
        tl.store(decays + place, decay, mask=has_t & has_h[None, :])
        tl.store(time_steps + place, seconds, mask=has_t & has_h[None, :])


@triton.jit(do_not_specialize=["step_tokens"])
def _ssd_states_kernel(
    x,
    b,
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
    time_steps,
    step_tokens,
    X_STRIDE: tl.constexpr,
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
        has_source = has_n[None, :] & (p < tl.where(source > 0, HEAD_SIZE - first_p, 0))[:, None]
        state = tl.load(pool + source * pool_stride + place, mask=has_source, other=0.0).to(tl.float32)
        slot_of_start = first_slot(start, row, CHUNK) - computed // CHUNK
        unit, num_chunks = row_chunks(computed, end, scratch, CHUNK)
        decays += head.to(tl.int64) * step_tokens
        time_steps += head.to(tl.int64) * step_tokens
        # A row with drafts goes token by token, but its decays are those of chunks: the chunk's so far.
        before = 0.0
        for k in range(num_chunks):
            first, last = chunk_bounds(computed, end, unit, k)
            begin = (start + first - computed).to(tl.int64)
            has_t = t < last - first
            seconds = tl.load(time_steps + begin + t, mask=has_t, other=0.0)
            decay = tl.load(decays + begin + t, mask=has_t, other=0.0)
            total = tl.load(decays + (begin + last - first - 1))
            x_at = x + (begin * X_STRIDE + channel) + t[:, None] * X_STRIDE + p[None, :]
            xs = tl.load(x_at, mask=has_t[:, None] & has_p[None, :], other=0.0)
            b_at = b + (begin * B_STRIDE + column) + t[:, None] * B_STRIDE + n[None, :]
            bs = tl.load(b_at, mask=has_t[:, None] & has_n[None, :], other=0.0)
            if (k > 0) & (first % CHUNK == 0) | (k == 0) & (source > 0):
                slot = (slot_of_start + first // CHUNK).to(tl.int64)
                tl.store(
                    starts + slot * pool_stride + place, state.to(starts.dtype.element_ty), mask=has_state
                )
            before = tl.where(first % CHUNK == 0, 0.0, before)
            left = (xs.to(tl.float32) * (tl.exp2(total - decay) * seconds)[:, None]).to(xs.dtype)
            state = tl.dot(tl.trans(left), bs, state * tl.exp2(total - before), input_precision="ieee")
            before = total
            table = block_table + row.to(tl.int64) * block_table_stride
            own, block = chunk_targets(computed, end, last, final, scratch, table, BLOCK_SIZE)
            kept = state.to(pool.dtype.element_ty)
            if own > 0:
                tl.store(pool + own * pool_stride + place, kept, mask=has_state)
            if block > 0:
                tl.store(pool + block * pool_stride + place, kept, mask=has_state)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
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
    time_steps,
    num_tokens,
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
    # A row of one token is `_ssd_decode_kernel`'s.
    row, k, begin, count = chunk_of_slot(slot, query_start_loc, seq_lens, num_rows, CHUNK, 2)
    if count > 0:
        source = tl.load(source_rows + row)
        first_p = tl.program_id(2) * BLOCK_P
        p, n, t = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
        num_channels = HEAD_SIZE - first_p
        has_p, has_n, has_t = p < num_channels, n < STATE_SIZE, t < count
        has_x, has_b = has_t[:, None] & has_p[None, :], has_t[:, None] & has_n[None, :]
        column = first_head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE
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
            token = head.to(tl.int64) * num_tokens + begin + t
            decay = tl.load(decays + token, mask=has_t, other=0.0)
            seconds = tl.load(time_steps + token, mask=has_t, other=0.0)
            gates, factors, skip = 0.0, 1.0, tl.load(d + head)
            if HAS_GATE:
                gate_at = gate + (begin * GATE_STRIDE + channel) + t[:, None] * GATE_STRIDE + p[None, :]
                gates = tl.load(gate_at, mask=has_x, other=0.0).to(tl.float32)
            if HAS_NORM:
                factors = tl.load(norm_weight + channel + p, mask=has_p, other=0.0).to(tl.float32)[None, :]
            ys = tl.dot(cs, tl.trans(state), input_precision="ieee") * tl.exp2(decay)[:, None]
            # Positive for later tokens, of which there is nothing: infinity times nothing would be no number.
            between = tl.minimum(decay[:, None] - decay[None, :], 0.0)
            gathered = both * tl.exp2(between) * seconds[None, :]
            ys = tl.dot(gathered.to(xs.dtype), xs, ys, input_precision="ieee")
            ys += skip * xs.to(tl.float32)
            squares_at = squares + ((begin + t) * NUM_HEADS + head) * tl.num_programs(2) + tl.program_id(2)
            ys = gated(ys, gates, factors, squares_at, has_t, HAS_GATE, HAS_NORM, GATE_LAST)
            Y_STRIDE: tl.constexpr = NUM_HEADS * HEAD_SIZE
            target = y + (begin * Y_STRIDE + channel) + t[:, None] * Y_STRIDE + p[None, :]
            tl.store(target, ys.to(y.dtype.element_ty), mask=has_x)


def _states_options(num_programs: int) -> dict[str, int]:
    """Where there are many programs they hide each other's waits, and three of them fit on a multiprocessor."""
    return {"num_stages": 1, "maxnreg": 168} if num_programs > _PROGRAMS else {"num_stages": 3}


def _heads_in_turn(num_heads: int, by_group: int, num_chunks: int) -> int:
    """Heads of one group that a program takes in turn: the inputs of some come while another is computed."""
    most = max(num_heads * num_chunks // _PROGRAMS, 1)
    return next(heads for n in (24, 4, 1) if (heads := math.gcd(by_group, n)) <= most)


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
    """Launch the three kernels: by chunk and heads, by row, head and piece of a state, by chunk, heads and piece."""
    num_rows, (num_heads, head_size, state_size) = len(step.seq_lens), pool.shape[1:]
    chunk = min(_CHUNK, step.block_size)
    slots = num_slots(len(x), num_rows, chunk)
    starts = x.new_empty(slots, num_heads, head_size, state_size)
    decays, time_steps = x.new_empty(2, num_heads, len(x), dtype=torch.float32)
    sizes = constants(pool, b, after)
    flags = {name: sizes.pop(name) for name in ("HAS_GATE", "HAS_NORM", "GATE_LAST")}
    sizes |= {"CHUNK": chunk, "BLOCK_T": max(chunk, 16)}
    block_n = min(sizes["BLOCK_N"], _PIECE_N)
    _ssd_decays_kernel[(slots, triton.cdiv(num_heads, _DECAY_HEADS))](
        *(dt, weights.a, weights.dt_bias, *weights.dt_limits),
        *(step.query_start_loc, step.seq_lens, num_rows),
        *(decays, time_steps, len(x)),
        dt.stride(0),
        NUM_HEADS=num_heads,
        CHUNK=chunk,
        BLOCK_T=sizes["BLOCK_T"],
        BLOCK_H=_DECAY_HEADS,
    )
    grid = (num_rows, num_heads, num_pieces(head_size) * triton.cdiv(state_size, block_n))
    _ssd_states_kernel[grid](
        *(x, b, pool),
        step.query_start_loc,
        step.seq_lens,
        step.source_rows,
        step.final_rows,
        step.scratch_rows,
        step.block_table,
        step.block_table.stride(0),
        *(starts, decays, time_steps, len(x)),
        *(x.stride(0), b.stride(0)),
        **{**sizes, "BLOCK_N": block_n},
        BLOCK_SIZE=step.block_size,
        **_states_options(math.prod(grid)),
    )
    heads = _heads_in_turn(num_heads, num_heads // b.shape[1], triton.cdiv(len(x), chunk))
    _ssd_outputs_kernel[(num_heads // heads, slots, num_pieces(head_size))](
        *(x, b, c, weights.d),
        *(step.query_start_loc, step.seq_lens, step.source_rows, num_rows),
        *(starts, decays, time_steps, len(x)),
        y,
        *gate_arguments(x, after),
        *(x.stride(0), b.stride(0), c.stride(0)),
        **sizes,
        **flags,
        HEADS=heads,
        STAGES=3,
    )
