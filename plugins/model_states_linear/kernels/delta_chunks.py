"""What the chunks of a gated delta scan take from their tokens alone: all chunks at once, before the walk over rows.

By the formulas of `gated_delta`: with M the inverse of a chunk's system and w what its tokens want of the state before,
the corrections are n = (M beta) w, and y = exp(l) state q + S n with S the masked products of queries and keys. Chunks
hold consecutive tokens, so row t of each matrix is kept for token t: `corrections` (M beta) fp32 and `seen` (S)
[H, num_tokens, T], of tokens u of the chunk in column u. `scalars` fp32 [3, H, num_tokens] are l and the factors that
norm (and scale) q and k. A row with drafts goes token by token, as chunks of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from model_states.kernels.state_chunks import chunk_of_slot, num_slots
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import RecurrentStep


class DeltaInputs(NamedTuple):
    """What the tokens bring: q, k [num_tokens, J, K], v [num_tokens, H, V], a, b [num_tokens, H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


class DeltaWeights(NamedTuple):
    """Parameters of one layer: rate (negative) and dt_bias fp32 [H], and the largest beta."""

    rate: torch.Tensor
    dt_bias: torch.Tensor
    max_beta: float


class DeltaChunks(NamedTuple):
    """See the module."""

    scalars: torch.Tensor
    corrections: torch.Tensor
    seen: torch.Tensor


@triton.jit
def log_decay(a, rate, dt_bias) -> tl.tensor:
    """rate softplus(a + dt_bias). log(1 + e) is that of the rounded sum, plus what the sum lost: decays are small."""
    x = a.to(tl.float32) + dt_bias
    e = tl.exp(-tl.abs(x))
    rounded = 1.0 + e
    return rate * (tl.maximum(x, 0.0) + tl.log(rounded) + (e - (rounded - 1.0)) / rounded)


@triton.jit
def inverse_length(x) -> tl.tensor:
    """1 / |x| of the rows of x [n, K], fp32 [n]."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _inverse(lower, t, LEVELS: tl.constexpr) -> tl.tensor:
    """(I + the part of `lower` below its diagonal)^-1 for [T, T] of 2^LEVELS rows.

    Blocks on the diagonal are inverted in pairs: the inverse of [[A, 0], [B, C]] has -C^-1 B A^-1 in B's place. Unlike
    powers of `lower`, this stays small where neighbouring keys are alike.
    """
    inverse = (t[:, None] == t[None, :]).to(tl.float32)
    for level in tl.static_range(LEVELS):
        size = 1 << level
        row, column = t[:, None] // size, t[None, :] // size
        between = tl.where((row % 2 == 1) & (row - 1 == column), lower, 0.0)
        right = tl.dot(between, inverse, input_precision="ieee")
        inverse -= tl.dot(inverse, right, input_precision="ieee")
    return inverse


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _delta_chunks_kernel(
    q,
    k,
    a,
    b,
    rate,
    dt_bias,
    max_beta,
    query_start_loc,
    seq_lens,
    scratch_rows,
    num_rows,
    scalars,
    corrections,
    seen,
    num_tokens,
    q_stride,
    k_stride,
    a_stride,
    b_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    row, _, begin, count = chunk_of_slot(tl.program_id(1), query_start_loc, seq_lens, num_rows, CHUNK, 1)
    if count > 0:
        head = tl.program_id(0)
        t, ck = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
        token, has_t = begin + t, t < count
        has_k = has_t[:, None] & (ck < KEY_SIZE)[None, :]
        at_k = head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_SIZE + ck[None, :]
        qs = tl.load(q + token[:, None] * q_stride + at_k, mask=has_k, other=0.0)
        ks = tl.load(k + token[:, None] * k_stride + at_k, mask=has_k, other=0.0)
        q_factor, k_factor = inverse_length(qs) * (KEY_SIZE**-0.5), inverse_length(ks)
        # The products are of the model's dtype, and their sums fp32.
        qs = (qs.to(tl.float32) * q_factor[:, None]).to(qs.dtype)
        ks = (ks.to(tl.float32) * k_factor[:, None]).to(ks.dtype)
        raw = tl.load(a + token * a_stride + head, mask=has_t, other=0.0)
        decay = log_decay(raw, tl.load(rate + head), tl.load(dt_bias + head))
        decay = tl.where(has_t, decay, 0.0)
        raw = tl.load(b + token * b_stride + head, mask=has_t, other=0.0).to(tl.float32)
        beta = tl.where(has_t, max_beta * tl.sigmoid(raw), 0.0)
        total = tl.cumsum(decay, 0)
        between = tl.exp(tl.where(t[:, None] >= t[None, :], total[:, None] - total[None, :], float("-inf")))
        system = tl.dot(ks, tl.trans(ks), input_precision="ieee") * between * beta[:, None]
        correction = _inverse(system, t, LEVELS) * beta[None, :]
        product = tl.dot(qs, tl.trans(ks), input_precision="ieee")
        own = tl.sum(tl.where(t[:, None] == t[None, :], product, 0.0), 1)
        # Each draft is a chunk of its own, whose only token is in column 0.
        drafts = tl.load(scratch_rows + row) > 0
        is_first = (t[None, :] == 0) & has_t[:, None]
        correction = tl.where(drafts, tl.where(is_first, beta[:, None], 0.0), correction)
        product = tl.where(drafts, tl.where(is_first, own[:, None], 0.0), product * between)
        place = head.to(tl.int64) * num_tokens + token
        plane = tl.full((), NUM_HEADS, tl.int64) * num_tokens
        tl.store(scalars + place, tl.where(drafts, decay, total), mask=has_t)
        tl.store(scalars + plane + place, q_factor, mask=has_t)
        tl.store(scalars + 2 * plane + place, k_factor, mask=has_t)
        at = place[:, None] * BLOCK_T + t[None, :]
        tl.store(corrections + at, correction, mask=has_t[:, None])
        tl.store(seen + at, product.to(seen.dtype.element_ty), mask=has_t[:, None])


def delta_chunks(
    inputs: DeltaInputs, weights: DeltaWeights, step: RecurrentStep, chunk: int, block_t: int
) -> DeltaChunks:
    """Launch one program for each chunk and value head. chunk: tokens of one; block_t: T, no less."""
    num_tokens, num_heads = inputs.v.shape[:2]
    num_key_heads, key_size = inputs.k.shape[1:]
    num_rows = len(step.seq_lens)
    out = DeltaChunks(
        inputs.v.new_empty(3, num_heads, num_tokens, dtype=torch.float32),
        inputs.v.new_empty(num_heads, num_tokens, block_t, dtype=torch.float32),
        inputs.v.new_empty(num_heads, num_tokens, block_t),
    )
    _delta_chunks_kernel[(num_heads, num_slots(num_tokens, num_rows, chunk))](
        inputs.q,
        inputs.k,
        inputs.a,
        inputs.b,
        *weights,
        step.query_start_loc,
        step.seq_lens,
        step.scratch_rows,
        num_rows,
        *out,
        num_tokens,
        *(part.stride(0) for part in (inputs.q, inputs.k, inputs.a, inputs.b)),
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads,
        KEY_SIZE=key_size,
        CHUNK=chunk,
        BLOCK_T=block_t,
        LEVELS=block_t.bit_length() - 1,
        BLOCK_K=max(triton.next_power_of_2(key_size), 16),
        num_warps=2,
    )
    return out
