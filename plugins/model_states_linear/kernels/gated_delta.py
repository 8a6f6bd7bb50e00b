"""The gated delta rule over rows of any length: a state that forgets, and corrects what it holds for a key.

For token t of value head h, of key head j = h // (H // J): q = q[t, j] / (|q[t, j]| sqrt(K)), k = k[t, j] / |k[t, j]|:

    decay = exp(rate[h] softplus(a[t, h] + dt_bias[h])),  beta = max_beta sigmoid(b[t, h])
    state = decay state;  state = state + beta (v[t, h] - state k) k^T       [V, K]
    y[t, h] = state q                                                       [V]

where |x| = sqrt(sum x^2 + 1e-6). The scan takes a chunk of tokens at once. With l the cumulative sum of log decay over
the chunk, the corrections n [tokens, V] of its tokens solve a unit lower triangular system:

    n[t] + beta[t] sum_{u < t} exp(l[t] - l[u]) (k[t] . k[u]) n[u] = beta[t] (v[t] - exp(l[t]) state k[t])

and y[t] = exp(l[t]) state q[t] + sum_{u <= t} exp(l[t] - l[u]) (q[t] . k[u]) n[u]. Decode steps take one token of
each row. q, k [num_tokens, J, K], v [num_tokens, H, V], a, b [num_tokens, H], with tokens apart and the rest
contiguous; rate, dt_bias fp32 [H]; y [num_tokens, H, V] contiguous; pool [num_rows, H, V, K] of any float dtype gives
and takes states as `RecurrentStep` says. Sums are fp32. Padding tokens of y are left alone, or zero in a decode step.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.state_chunks import chunk_bounds, chunk_targets, row_chunks
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import CHUNK_SIZE, RecurrentStep
from model_states_linear.kernels.delta_chunks import (
    DeltaInputs,
    DeltaWeights,
    delta_chunks,
    inverse_length,
    log_decay,
)

# Of the Triton scan: what an unrolled solution of longer chunks holds does not fit in registers.
_CHUNK = 16


def gated_delta_torch(
    inputs: DeltaInputs, weights: DeltaWeights, pool: torch.Tensor, step: RecurrentStep, y: torch.Tensor
) -> None:
    """The chunked form above, row by row."""
    prepared = _prepare(inputs, weights)
    if step.is_decode:
        _decode_torch(prepared, pool, step, y)
        return
    for source, chunks in step.chunks(CHUNK_SIZE):
        state = pool[source].float()
        for start, stop, targets in chunks:
            by_head = [part[start:stop].transpose(0, 1) for part in prepared]
            out, state = _chunk_torch(DeltaInputs(*by_head), state)
            y[start:stop] = out.transpose(0, 1)
            for target in targets:
                pool[target] = state.to(pool.dtype)


def _prepare(inputs: DeltaInputs, weights: DeltaWeights) -> DeltaInputs:
    """All fp32 and by value head: normed q (scaled) and k, v, log decay in the place of a, and beta in that of b."""
    q, k, v, a, b = (part.float() for part in inputs)
    repeats = v.shape[1] // k.shape[1]
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, 1)
        for x in (q, k)
    )
    log_decay = weights.rate * functional.softplus(a + weights.dt_bias)
    return DeltaInputs(q * q.shape[-1] ** -0.5, k, v, log_decay, weights.max_beta * b.sigmoid())


def _chunk_torch(chunk: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y [H, n, V] and the state [H, V, K] after the n tokens of one chunk, whose parts are [H, n, ..]."""
    q, k, v, log_decay, beta = chunk
    total = log_decay.cumsum(1)
    future = torch.ones(v.shape[1], v.shape[1], dtype=torch.bool, device=v.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(future, -torch.inf).exp()
    decayed = total.exp()[..., None]
    wanted = beta[..., None] * (v - decayed * (k @ state.mT))
    system = beta[..., None] * (k @ k.mT) * between
    new = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    y = decayed * (q @ state.mT) + (q @ k.mT * between) @ new
    left = (total[:, -1:] - total).exp()[..., None]
    return y, decayed[:, -1:] * state + new.mT @ (left * k)


def _decode_torch(prepared: DeltaInputs, pool: torch.Tensor, step: RecurrentStep, y: torch.Tensor) -> None:
    """One token of each row, all rows at once."""
    q, k, v, log_decay, beta = prepared
    is_real = (step.final_rows > 0)[:, None, None]
    state = pool[step.source_rows].float() * log_decay.exp()[..., None, None]
    error = v - (state @ k[..., None])[..., 0]
    state += (beta[..., None] * error)[..., None] * k[:, :, None]
    y.copy_(torch.where(is_real, (state @ q[..., None])[..., 0], 0.0))
    # Padding rows have row 0 as their target, which stays zero.
    pool[step.final_rows] = torch.where(is_real[..., None], state, 0.0).to(pool.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_delta_kernel(
    q,
    k,
    v,
    scalars,
    corrections,
    seen,
    pool,
    query_start_loc,
    seq_lens,
    source_rows,
    final_rows,
    scratch_rows,
    block_table,
    block_table_stride,
    y,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start_loc + row)
    row_tokens = tl.load(query_start_loc + row + 1) - start
    if row_tokens > 0:
        key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
        cv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        ck = tl.arange(0, BLOCK_K)
        t = tl.arange(0, BLOCK_T)
        has_state = (cv < VALUE_SIZE)[:, None] & (ck < KEY_SIZE)[None, :]
        place = (head * VALUE_SIZE + cv[:, None]) * KEY_SIZE + ck[None, :]
        pool_stride = tl.full((), NUM_HEADS * VALUE_SIZE * KEY_SIZE, tl.int64)
        plane = tl.full((), NUM_HEADS, tl.int64) * num_tokens
        end = tl.load(seq_lens + row)
        computed = end - row_tokens
        source = tl.load(source_rows + row).to(tl.int64)
        final = tl.load(final_rows + row)
        scratch = tl.load(scratch_rows + row)
        state = tl.load(pool + source * pool_stride + place, mask=has_state, other=0.0).to(tl.float32)
        unit, num_chunks = row_chunks(computed, end, scratch, CHUNK)
        for i in range(num_chunks):
            first, last = chunk_bounds(computed, end, unit, i)
            token = (start + first - computed + t).to(tl.int64)
            has_t = t < last - first
            has_k = has_t[:, None] & (ck < KEY_SIZE)[None, :]
            has_v = has_t[:, None] & (cv < VALUE_SIZE)[None, :]
            at_k = key_head * KEY_SIZE + ck[None, :]
            qs = tl.load(q + token[:, None] * q_stride + at_k, mask=has_k, other=0.0)
            ks = tl.load(k + token[:, None] * k_stride + at_k, mask=has_k, other=0.0)
            at_v = head * VALUE_SIZE + cv[None, :]
            vs = tl.load(v + token[:, None] * v_stride + at_v, mask=has_v, other=0.0)
            at_t = head.to(tl.int64) * num_tokens + token
            total = tl.load(scalars + at_t, mask=has_t, other=0.0)
            q_factor = tl.load(scalars + plane + at_t, mask=has_t, other=0.0)
            k_factor = tl.load(scalars + 2 * plane + at_t, mask=has_t, other=0.0)
            whole = tl.load(scalars + (head.to(tl.int64) * num_tokens + start + last - 1 - computed))
            at_u = at_t[:, None] * BLOCK_T + t[None, :]
            correction = tl.load(corrections + at_u, mask=has_t[:, None], other=0.0)
            product = tl.load(seen + at_u, mask=has_t[:, None], other=0.0)
            # The products are of the model's dtype, and their sums fp32.
            qs = (qs.to(tl.float32) * q_factor[:, None]).to(qs.dtype)
            ks = (ks.to(tl.float32) * k_factor[:, None]).to(ks.dtype)
            decayed = tl.exp(total)[:, None]
            before = tl.trans(state).to(ks.dtype)
            wanted = vs.to(tl.float32) - decayed * tl.dot(ks, before, input_precision="ieee")
            new = tl.dot(correction, wanted, input_precision="ieee").to(vs.dtype)
            ys = decayed * tl.dot(qs, before, input_precision="ieee")
            ys += tl.dot(product, new, input_precision="ieee")
            target = y + (token[:, None] * NUM_HEADS + head) * VALUE_SIZE + cv[None, :]
            tl.store(target, ys.to(y.dtype.element_ty), mask=has_v)
            left = (ks.to(tl.float32) * tl.exp(whole - total)[:, None]).to(vs.dtype)
            state = state * tl.exp(whole) + tl.dot(tl.trans(new), left, input_precision="ieee")
            table = block_table + row.to(tl.int64) * block_table_stride
            own, block = chunk_targets(computed, end, last, final, scratch, table, BLOCK_SIZE)
            kept = state.to(pool.dtype.element_ty)
            if own > 0:
                tl.store(pool + own * pool_stride + place, kept, mask=has_state)
            if block > 0:
                tl.store(pool + block * pool_stride + place, kept, mask=has_state)


@triton.jit
def _decode_kernel(
    q,
    k,
    v,
    a,
    b,
    rate,
    dt_bias,
    max_beta,
    pool,
    source_rows,
    final_rows,
    y,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # Neighbours are heads of one row, whose states are neighbours too.
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    cv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    ck = tl.arange(0, BLOCK_K)
    pool_stride = tl.full((), NUM_HEADS * VALUE_SIZE * KEY_SIZE, tl.int64)
    head_rate, head_bias = tl.load(rate + head), tl.load(dt_bias + head)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = tl.load(source_rows + row).to(tl.int64)
    final = tl.load(final_rows + row).to(tl.int64)
    # Nothing of a padding row is read or kept, and its y is zero.
    has_v, has_k = cv < tl.where(final > 0, VALUE_SIZE, 0), ck < tl.where(final > 0, KEY_SIZE, 0)
    has_state = has_v[:, None] & has_k[None, :]
    place = (head * VALUE_SIZE + cv[:, None]) * KEY_SIZE + ck[None, :]
    state = tl.load(pool + source * pool_stride + place, mask=has_state, other=0.0).to(tl.float32)
    qs = tl.load(q + row * q_stride + key_head * KEY_SIZE + ck, mask=has_k, other=0.0)[None, :]
    ks = tl.load(k + row * k_stride + key_head * KEY_SIZE + ck, mask=has_k, other=0.0)[None, :]
    vs = tl.load(v + row * v_stride + head * VALUE_SIZE + cv, mask=has_v, other=0.0).to(tl.float32)
    raw = tl.load(b + row * b_stride + head, mask=final > 0, other=0.0).to(tl.float32)
    beta = max_beta * tl.sigmoid(raw)
    raw = tl.load(a + row * a_stride + head, mask=final > 0, other=0.0)
    state *= tl.exp(log_decay(raw, head_rate, head_bias))
    ks = ks.to(tl.float32) * inverse_length(ks)[:, None]
    error = vs - tl.sum(state * ks, 1)
    state += (beta * error)[:, None] * ks
    tl.store(pool + final * pool_stride + place, state.to(pool.dtype.element_ty), mask=has_state)
    qs = qs.to(tl.float32) * inverse_length(qs)[:, None]
    ys = tl.sum(state * qs, 1) * (KEY_SIZE**-0.5)
    tl.store(y + (row * NUM_HEADS + head) * VALUE_SIZE + cv, ys.to(y.dtype.element_ty), mask=cv < VALUE_SIZE)


def gated_delta_triton(
    inputs: DeltaInputs, weights: DeltaWeights, pool: torch.Tensor, step: RecurrentStep, y: torch.Tensor
) -> None:
    """Launch one program for each row, head and piece of a head; it walks the chunks of `delta_chunks` in order."""
    num_heads, value_size, key_size = pool.shape[1:]
    strides = [part.stride(0) for part in inputs]
    num_rows = len(step.seq_lens)
    sizes = {
        "NUM_HEADS": num_heads,
        "NUM_KEY_HEADS": inputs.k.shape[1],
        "VALUE_SIZE": value_size,
        "KEY_SIZE": key_size,
        "BLOCK_K": max(triton.next_power_of_2(key_size), 16),
    }
    is_narrow = y.element_size() < 4
    most = 32 if step.is_decode or not is_narrow else 64
    block_v = min(max(triton.next_power_of_2(value_size), 16), most)
    grid = (num_heads, triton.cdiv(value_size, block_v))
    if step.is_decode:
        _decode_kernel[(grid[0], num_rows, grid[1])](
            *inputs,
            *weights,
            pool,
            step.source_rows,
            step.final_rows,
            y,
            *strides,
            BLOCK_V=block_v,
            **sizes,
            **programmatic_launch(y),
        )
        return
    chunk = min(_CHUNK, step.block_size)
    block_t = max(chunk, 16)
    _gated_delta_kernel[(num_rows, *grid)](
        inputs.q,
        inputs.k,
        inputs.v,
        *delta_chunks(inputs, weights, step, chunk, block_t),
        pool,
        step.query_start_loc,
        step.seq_lens,
        step.source_rows,
        step.final_rows,
        step.scratch_rows,
        step.block_table,
        step.block_table.stride(0),
        y,
        len(y),
        *strides[:3],
        BLOCK_SIZE=step.block_size,
        CHUNK=chunk,
        BLOCK_T=block_t,
        BLOCK_V=block_v,
        **sizes,
        num_warps=4 if is_narrow else 8,
    )


def gated_delta(
    inputs: DeltaInputs, weights: DeltaWeights, pool: torch.Tensor, step: RecurrentStep, y: torch.Tensor
) -> None:
    """Write `y`, and the states of the step to `pool`."""
    op = gated_delta_triton if use_triton(y) else gated_delta_torch
    op(inputs, weights, pool, step, y)
