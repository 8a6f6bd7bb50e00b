"""The state space of Mamba-2, with one decay for each head (SSD), over rows of any length.

For token t of head h (group g = h // (H // G)), with s = clamp(softplus(dt[t, h] + dt_bias[h]), dt_limits):

    state = exp(s a[h]) state + s x[t, h] b[t, g]^T        [P, N]
    y[t, h] = state c[t, g] + d[h] x[t, h]                 [P]

The scan takes a chunk of tokens at once: with l the cumulative sum of s a over the chunk, token t gathers
exp(l[t] - l[u]) s[u] (c[t] . b[u]) x[u] from the tokens u <= t and exp(l[t]) state c[t] from before. Decode steps
take one token of each row. x, y [num_tokens, H, P]; dt [num_tokens, H]; b, c [num_tokens, G, N], all with tokens apart
and the rest contiguous; a, d, dt_bias fp32 [H]; pool [num_rows, H, P, N] of any float dtype gives and takes states as
`RecurrentStep` says. Sums are fp32. Padding tokens of y are left alone, or zero in a decode step.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.state_chunks import chunk_bounds, chunk_targets, row_chunks
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import CHUNK_SIZE, RecurrentStep
from model_states_mamba.kernels.ssd_decode import ssd_decode_torch, ssd_decode_triton
from model_states_mamba.kernels.ssd_parts import (
    Gated,
    SsdWeights,
    by_head,
    constants,
    gate_arguments,
    gate_torch,
    gated,
    num_pieces,
    time_step,
    time_steps,
)

__all__ = ["Gated", "SsdWeights", "num_pieces", "ssd_scan", "ssd_scan_torch", "ssd_scan_triton"]

# Of the Triton scan: twice as fast as 64 on an H200, for the same sums.
_CHUNK = 32


def ssd_scan_torch(
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
    """The chunked form above, row by row."""
    if step.is_decode:
        ssd_decode_torch(x, dt, b, c, weights, pool, step, y)
    else:
        _scan_torch(x, dt, b, c, weights, pool, step, y)
    if after is not None:
        gate_torch(y, after)


def _scan_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
) -> None:
    seconds = time_steps(dt, weights)
    for source, chunks in step.chunks(CHUNK_SIZE):
        state = pool[source].float()
        for start, stop, targets in chunks:
            tokens = slice(start, stop)
            y[tokens], state = _chunk_torch(x[tokens], seconds[tokens], b[tokens], c[tokens], weights, state)
            for target in targets:
                pool[target] = state.to(pool.dtype)


def _chunk_torch(
    x: torch.Tensor,
    seconds: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the state after the tokens of one chunk, both fp32."""
    x, b, c = x.float(), by_head(b, x.shape[1]), by_head(c, x.shape[1])
    decay = (seconds * weights.a).cumsum(0)  # [n, H]
    future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
    between = (decay[:, None] - decay).masked_fill(future[..., None], -torch.inf).exp()
    gathered = torch.einsum("thn,uhn->tuh", c, b) * between * seconds
    y = torch.einsum("tuh,uhp->thp", gathered, x)
    y += torch.einsum("thn,hpn->thp", c, state) * decay.exp()[..., None] + weights.d[:, None] * x
    left = (decay[-1] - decay).exp() * seconds
    state = state * decay[-1].exp()[:, None, None] + torch.einsum("thp,thn,th->hpn", x, b, left)
    return y, state


@triton.jit
def _ssd_scan_kernel(
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
    seq_lens,
    source_rows,
    final_rows,
    scratch_rows,
    block_table,
    block_table_stride,
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
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_LAST: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    # A row of one token is `_ssd_decode_kernel`'s.
    if num_tokens > 1:
        group = head // (NUM_HEADS // NUM_GROUPS)
        p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        n = tl.arange(0, BLOCK_N)
        t = tl.arange(0, BLOCK_T)
        has_n = n < STATE_SIZE
        has_state = (p < HEAD_SIZE)[:, None] & has_n[None, :]
        place = (head * HEAD_SIZE + p[:, None]) * STATE_SIZE + n[None, :]
        pool_stride = tl.full((), NUM_HEADS * HEAD_SIZE * STATE_SIZE, tl.int64)
        end = tl.load(seq_lens + row)
        computed = end - num_tokens
        source = tl.load(source_rows + row).to(tl.int64)
        final = tl.load(final_rows + row)
        scratch = tl.load(scratch_rows + row)
        decay_rate, skip = tl.load(a + head), tl.load(d + head)
        bias = tl.load(dt_bias + head)
        state = tl.load(pool + source * pool_stride + place, mask=has_state, other=0.0).to(tl.float32)
        at = head * HEAD_SIZE + p[None, :]
        factors = tl.full((1, BLOCK_P), 1.0, tl.float32)
        if HAS_NORM:
            factors = tl.load(norm_weight + at, mask=(p < HEAD_SIZE)[None, :], other=0.0).to(tl.float32)
        unit, num_chunks = row_chunks(computed, end, scratch, CHUNK)
        for k in range(num_chunks):
            first, last = chunk_bounds(computed, end, unit, k)
            token = (start + first - computed + t).to(tl.int64)
            has_t = t < last - first
            raw = tl.load(dt + token * dt_stride + head, mask=has_t, other=0.0).to(tl.float32)
            seconds = tl.where(has_t, time_step(raw + bias, dt_low, dt_high), 0.0)
            has_x = has_t[:, None] & (p < HEAD_SIZE)[None, :]
            has_b = has_t[:, None] & has_n[None, :]
            xs = tl.load(x + token[:, None] * x_stride + at, mask=has_x, other=0.0)
            gates = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
            if HAS_GATE:
                gate_at = gate + token[:, None] * gate_stride + at
                gates = tl.load(gate_at, mask=has_x, other=0.0).to(tl.float32)
            bs = tl.load(
                b + token[:, None] * b_stride + group * STATE_SIZE + n[None, :], mask=has_b, other=0.0
            )
            cs = tl.load(
                c + token[:, None] * c_stride + group * STATE_SIZE + n[None, :], mask=has_b, other=0.0
            )
            decay = tl.cumsum(seconds * decay_rate, 0)
            total = tl.sum(seconds * decay_rate, 0)
            between = tl.where(t[:, None] >= t[None, :], decay[:, None] - decay[None, :], float("-inf"))
            gathered = tl.dot(cs, tl.trans(bs), input_precision="ieee") * tl.exp(between) * seconds[None, :]
            ys = tl.dot(cs, tl.trans(state).to(cs.dtype), input_precision="ieee") * tl.exp(decay)[:, None]
            ys += tl.dot(gathered.to(xs.dtype), xs, input_precision="ieee")
            ys += skip * xs.to(tl.float32)
            squares_at = squares + (token * NUM_HEADS + head) * tl.num_programs(2) + tl.program_id(2)
            ys = gated(ys, gates, factors, squares_at, has_t, HAS_GATE, HAS_NORM, GATE_LAST)
            target = y + token[:, None] * (NUM_HEADS * HEAD_SIZE) + at
            tl.store(target, ys.to(y.dtype.element_ty), mask=has_x)
            left = bs.to(tl.float32) * (tl.exp(total - decay) * seconds)[:, None]
            state = state * tl.exp(total) + tl.dot(tl.trans(xs), left.to(xs.dtype), input_precision="ieee")
            table = block_table + row.to(tl.int64) * block_table_stride
            own, block = chunk_targets(computed, end, last, final, scratch, table, BLOCK_SIZE)
            kept = state.to(pool.dtype.element_ty)
            if own > 0:
                tl.store(pool + own * pool_stride + place, kept, mask=has_state)
            if block > 0:
                tl.store(pool + block * pool_stride + place, kept, mask=has_state)


def ssd_scan_triton(
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
    """Rows of one token, then a program for each longer row, head and piece of a head; it walks the chunks in order."""
    ssd_decode_triton(x, dt, b, c, weights, pool, step, y, after)
    if step.is_decode:
        return
    num_heads, head_size = pool.shape[1:3]
    chunk = min(_CHUNK, step.block_size)
    _ssd_scan_kernel[(len(step.seq_lens), num_heads, num_pieces(head_size))](
        *(x, dt, b, c, weights.a, weights.d, weights.dt_bias, *weights.dt_limits, pool),
        step.query_start_loc,
        step.seq_lens,
        step.source_rows,
        step.final_rows,
        step.scratch_rows,
        step.block_table,
        step.block_table.stride(0),
        y,
        *gate_arguments(x, after),
        *(x.stride(0), dt.stride(0), b.stride(0), c.stride(0)),
        BLOCK_SIZE=step.block_size,
        CHUNK=chunk,
        BLOCK_T=max(chunk, 16),
        **constants(pool, b, after),
        # Tiles that are copied ahead take addresses and room: 235 us became 294 on an H200.
        num_stages=1,
    )


def ssd_scan(
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
    """Write `y`, and the states of the step to `pool`; `after` says what follows y."""
    op = ssd_scan_triton if use_triton(x) else ssd_scan_torch
    op(x, dt, b, c, weights, pool, step, y, after)
