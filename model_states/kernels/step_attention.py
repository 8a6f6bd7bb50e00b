"""Write a step's keys and values into the paged cache and attend over it, for rows of one query each.

For every row b, whose token is b, with n = seq_lens[b] - 1 earlier tokens and slot = slot_mapping[b], and every head h:

    key_cache[slot // block_size, slot % block_size, h] = key[b, h], the same of values       where slot >= 0
    s[p]      = scale * query[b, h] . k[p]               with k[n], v[n] those of the token, and those before it of the
    out[b, h] = sum_p exp(s[p]) v[p] / sum_p exp(s[p])   cache: p in block block_table[b, p // block_size]

A row with seq_len 0 is padding and gets zeros. query, key and value [num_rows, num_heads, head_size], of equal strides
and as parts of one product; out the same, contiguous; caches [num_blocks, block_size, num_heads, head_size].

One kernel, with one warp for a row and a head, rather than one that writes and one that cuts long rows into parts.
Where rows are short and many that is what takes the time. All that earlier steps have written is asked for before the
kernel waits for the product.
"""

from __future__ import annotations

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec
from model_states.attention.reference import attend_row, rows_of
from model_states.attention.torch_backend import write_cache_torch
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.sizes import next_power_of_2
from model_states.kernels.triton_import import tl, triton

_LONGEST = 512  # tokens of a row; longer ones are for more than a warp
_LEAST_WARPS = 513  # rows times heads: fewer do not keep the memory busy
_MAX_HEAD_SIZE = 128
_BLOCK_N = 16


def serves_step(query: torch.Tensor, metadata: AttentionMetadata, spec: AttentionSpec) -> bool:
    """Whether `step_attention` is there for such a step, and faster than writing and attending by themselves."""
    if spec.num_heads != spec.num_kv_heads or spec.head_size != spec.head_size_v:
        return False
    if spec.sliding_window is not None or spec.soft_cap is not None or spec.has_sinks or spec.value_from_key:
        return False
    is_short = metadata.max_query_len == 1 and metadata.max_seq_len <= _LONGEST
    is_many = len(query) * spec.num_heads >= _LEAST_WARPS
    return use_triton(query) and is_short and is_many and spec.head_size <= _MAX_HEAD_SIZE


def step_attention_torch(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
) -> None:
    """The formula above, one row at a time."""
    write_cache_torch(key, value, key_cache, value_cache, metadata.slot_mapping)
    out.zero_()
    for row, token, _, seq_len in rows_of(metadata):
        own, blocks = slice(token, token + 1), metadata.block_table[row]
        out[own] = attend_row(query[own], key_cache, value_cache, blocks, seq_len, spec, None).to(out.dtype)


@triton.jit
def _places(
    table, head, first, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr
) -> tl.tensor:
    """Which vectors of the cache the tokens [first, first + BLOCK_N) before `end` have, int64."""
    n = first + tl.arange(0, BLOCK_N)
    block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0).to(tl.int64)
    return (block * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_HEADS + head


@triton.jit
def _vectors(
    cache, places, first, end, BLOCK_N: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """What the cache holds of them, [BLOCK_N, BLOCK_D]; zeros past `end`, where it may hold NaN."""
    n, d = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    loads = (n < end)[:, None] & (d < HEAD_SIZE)[None, :]
    return tl.load(cache + places[:, None] * HEAD_SIZE + d[None, :], mask=loads, other=0.0)


@triton.jit
def _step_attention_kernel(
    out,
    query,
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    seq_lens,
    block_table,
    table_stride,
    token_stride,
    head_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    # Heads are the fastest axis: the programs that run together read neighbouring memory.
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    is_d = d < HEAD_SIZE
    num_before = tl.load(seq_lens + row) - 1
    slot = tl.load(slot_mapping + row)
    table = block_table + row * table_stride
    # What is multiplied was loaded one turn before, and its places were looked up two turns before.
    places = _places(table, head, 0, num_before, BLOCK_N, BLOCK_SIZE, NUM_HEADS)
    k = _vectors(key_cache, places, 0, num_before, BLOCK_N, HEAD_SIZE, BLOCK_D)
    v = _vectors(value_cache, places, 0, num_before, BLOCK_N, HEAD_SIZE, BLOCK_D)
    places = _places(table, head, BLOCK_N, num_before, BLOCK_N, BLOCK_SIZE, NUM_HEADS)
    if PDL:
        gdc_wait()
    own = row * token_stride + head * head_stride + d
    q = tl.load(query + own, mask=is_d, other=0.0).to(tl.float32) * (scale * 1.4426950408889634)
    k_own = tl.load(key + own, mask=is_d, other=0.0)
    v_own = tl.load(value + own, mask=is_d, other=0.0)
    target = (slot * NUM_HEADS + head) * HEAD_SIZE + d
    writes = is_d & (slot + 0 * d >= 0)
    tl.store(key_cache + target, k_own.to(key_cache.dtype.element_ty), mask=writes)
    tl.store(value_cache + target, v_own.to(value_cache.dtype.element_ty), mask=writes)
    # The token sees itself, so the sums begin with it.
    maximum = tl.sum(q * k_own.to(tl.float32), 0)
    total = 1.0
    acc = v_own.to(tl.float32)
    for first in range(0, num_before, BLOCK_N):
        following = first + BLOCK_N
        next_k = _vectors(key_cache, places, following, num_before, BLOCK_N, HEAD_SIZE, BLOCK_D)
        next_v = _vectors(value_cache, places, following, num_before, BLOCK_N, HEAD_SIZE, BLOCK_D)
        places = _places(table, head, following + BLOCK_N, num_before, BLOCK_N, BLOCK_SIZE, NUM_HEADS)
        scores = tl.sum(q[None, :] * k.to(tl.float32), 1)
        scores = tl.where(first + tl.arange(0, BLOCK_N) < num_before, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        weights, shrink = tl.exp2(scores - new_maximum), tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * v.to(tl.float32), 0)
        maximum = new_maximum
        k, v = next_k, next_v
    result = tl.where(num_before < 0, 0.0, acc / total)
    tl.store(out + (row * NUM_HEADS + head) * HEAD_SIZE + d, result.to(out.dtype.element_ty), mask=is_d)


def step_attention_triton(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
) -> None:
    """Launch over (heads, rows)."""
    num_rows, num_heads, head_size = query.shape
    assert query.stride() == key.stride() == value.stride(), "query, key and value are parts of one product"
    _step_attention_kernel[(num_heads, num_rows)](
        *(out, query, key, value, key_cache, value_cache),
        *(metadata.slot_mapping, metadata.seq_lens, metadata.block_table, metadata.block_table.stride(0)),
        *(query.stride(0), query.stride(1), spec.scale),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_N=_BLOCK_N,
        BLOCK_D=next_power_of_2(head_size),
        num_warps=1,
        **programmatic_launch(query),
    )


def step_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
) -> None:
    """Write `out` and the caches."""
    op = step_attention_triton if use_triton(query) else step_attention_torch
    op(out, query, key, value, key_cache, value_cache, metadata, spec)
