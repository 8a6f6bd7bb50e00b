"""The state space of Mamba-1, with a decay for every channel and state (selective scan), over rows of any length.

For token t of channel d, with s = softplus(dt[t, d] + dt_bias[d]):

    state[n] = exp(s a[d, n]) state[n] + s x[t, d] b[t, n]
    y[t, d] = (sum_n state[n] c[t, n] + skip[d] x[t, d]) silu(gate[t, d])

x, dt, gate [num_tokens, D]; b, c [num_tokens, N], all with tokens apart; y [num_tokens, D] contiguous; a fp32 [D, N],
skip, dt_bias fp32 [D]; pool [num_rows, D, N] of any float dtype gives and takes states as `RecurrentStep` says. Sums
are fp32. Padding tokens of y are left alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from model_states.kernels.dispatch import use_triton
from model_states.kernels.state_chunks import chunk_bounds, chunk_targets, row_chunks
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import CHUNK_SIZE, RecurrentStep
from model_states_mamba.kernels.softplus import softplus

_BLOCK_D = 32


class SelectiveWeights(NamedTuple):
    """Parameters of one layer in fp32: a [D, N], skip and dt_bias [D]."""

    a: torch.Tensor
    skip: torch.Tensor
    dt_bias: torch.Tensor


class SelectiveInputs(NamedTuple):
    """What the formula reads of every token: x, dt, gate [num_tokens, D], b, c [num_tokens, N]."""

    x: torch.Tensor
    dt: torch.Tensor
    gate: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor


def selective_scan_torch(
    inputs: SelectiveInputs,
    weights: SelectiveWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
) -> None:
    """The formula above, token by token; a decode step takes all its rows at once."""
    if step.is_decode:
        is_real = (step.final_rows > 0)[:, None, None]
        state, read = _advance(inputs, weights, pool[step.source_rows].float())
        # Padding rows have row 0 as their target, which stays zero.
        pool[step.final_rows] = (state * is_real).to(pool.dtype)
        y.copy_(read)
        return
    for source, chunks in step.chunks(CHUNK_SIZE):
        state = pool[source].float()[None]
        for start, stop, targets in chunks:
            for t in range(start, stop):
                token = SelectiveInputs(*(tensor[t : t + 1] for tensor in inputs))
                state, y[t : t + 1] = _advance(token, weights, state)
            for target in targets:
                pool[target] = state[0].to(pool.dtype)


def _advance(
    inputs: SelectiveInputs, weights: SelectiveWeights, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state [n, D, N] after one token of each row, and y [n, D], both fp32."""
    x, dt, gate, b, c = (tensor.float() for tensor in inputs)
    seconds = functional.softplus(dt + weights.dt_bias)
    state = state * (seconds[..., None] * weights.a).exp() + (seconds * x)[..., None] * b[:, None]
    read = torch.einsum("tdn,tn->td", state, c) + weights.skip * x
    return state, read * functional.silu(gate)


@triton.jit
def _selective_scan_kernel(
    x,
    dt,
    gate,
    b,
    c,
    x_stride,
    dt_stride,
    gate_stride,
    b_stride,
    c_stride,
    a,
    skip,
    dt_bias,
    pool,
    query_start_loc,
    seq_lens,
    source_rows,
    final_rows,
    scratch_rows,
    block_table,
    block_table_stride,
    y,
    SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    if num_tokens > 0:
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        n = tl.arange(0, BLOCK_N)
        has_d, has_n = d < SIZE, n < STATE_SIZE
        has_state = has_d[:, None] & has_n[None, :]
        place = d[:, None] * STATE_SIZE + n[None, :]
        pool_stride = tl.full((), SIZE * STATE_SIZE, tl.int64)
        end = tl.load(seq_lens + row)
        computed = end - num_tokens
        source = tl.load(source_rows + row).to(tl.int64)
        final = tl.load(final_rows + row)
        scratch = tl.load(scratch_rows + row)
        rates = tl.load(a + place, mask=has_state, other=0.0)
        skips = tl.load(skip + d, mask=has_d, other=0.0)
        bias = tl.load(dt_bias + d, mask=has_d, other=0.0)
        state = tl.load(pool + source * pool_stride + place, mask=has_state, other=0.0).to(tl.float32)
        unit, num_chunks = row_chunks(computed, end, scratch, CHUNK)
        for k in range(num_chunks):
            first, last = chunk_bounds(computed, end, unit, k)
            for i in range(first - computed, last - computed):
                token = (start + i).to(tl.int64)
                xs = tl.load(x + token * x_stride + d, mask=has_d, other=0.0).to(tl.float32)
                raw = tl.load(dt + token * dt_stride + d, mask=has_d, other=0.0).to(tl.float32)
                gates = tl.load(gate + token * gate_stride + d, mask=has_d, other=0.0).to(tl.float32)
                bs = tl.load(b + token * b_stride + n, mask=has_n, other=0.0).to(tl.float32)
                cs = tl.load(c + token * c_stride + n, mask=has_n, other=0.0).to(tl.float32)
                seconds = softplus(raw + bias)
                state = state * tl.exp(seconds[:, None] * rates) + (seconds * xs)[:, None] * bs[None, :]
                ys = (tl.sum(state * cs[None, :], 1) + skips * xs) * gates * tl.sigmoid(gates)
                tl.store(y + token * SIZE + d, ys.to(y.dtype.element_ty), mask=has_d)
            table = block_table + row.to(tl.int64) * block_table_stride
            own, block = chunk_targets(computed, end, last, final, scratch, table, BLOCK_SIZE)
            kept = state.to(pool.dtype.element_ty)
            if own > 0:
                tl.store(pool + own * pool_stride + place, kept, mask=has_state)
            if block > 0:
                tl.store(pool + block * pool_stride + place, kept, mask=has_state)


def selective_scan_triton(
    inputs: SelectiveInputs,
    weights: SelectiveWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
) -> None:
    """Launch one program for each row and piece of its channels; it walks the row's tokens in order."""
    size, state_size = pool.shape[1:]
    _selective_scan_kernel[(len(step.seq_lens), triton.cdiv(size, _BLOCK_D))](
        *inputs,
        *(tensor.stride(0) for tensor in inputs),
        *weights,
        pool,
        step.query_start_loc,
        step.seq_lens,
        step.source_rows,
        step.final_rows,
        step.scratch_rows,
        step.block_table,
        step.block_table.stride(0),
        y,
        SIZE=size,
        STATE_SIZE=state_size,
        BLOCK_SIZE=step.block_size,
        CHUNK=min(CHUNK_SIZE, step.block_size),
        BLOCK_D=_BLOCK_D,
        BLOCK_N=triton.next_power_of_2(state_size),
        num_warps=1,
    )


def selective_scan(
    inputs: SelectiveInputs,
    weights: SelectiveWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
) -> None:
    """Write `y`, and the states of the step to `pool`."""
    op = selective_scan_triton if use_triton(inputs.x) else selective_scan_torch
    op(inputs, weights, pool, step, y)
