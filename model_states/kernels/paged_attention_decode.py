"""Paged attention of rows with few queries, split over the keys.

For every row b of 1 to `short` queries, query_len = query_start_loc[b + 1] - query_start_loc[b], its query i at
token t = query_start_loc[b] + i and position q = seq_lens[b] - query_len + i, and every head h:

    s[p]      = cap(scale * query[t, h] . key[b, p, h'])                       for p in (q - window, q]
    out[t, h] = sum_p exp(s[p]) value[b, p, h'] / (sum_p exp(s[p]) + exp(sinks[h]))

with h' = h // (num_heads // num_kv_heads), cap(x) = soft_cap * tanh(x / soft_cap) and position p of row b at
block block_table[b, p // block_size], offset p % block_size. Longer rows are not touched. Where max_query_len says
that there are none, tokens at or past query_start_loc[-1] get zeros. Shapes are those of `AttentionBackend.attend`;
out is contiguous.

A program takes the query heads of one kv head and one part of a row's keys, so that each key is read once. How many
keys a part has follows from the lengths of all rows, on the device: a row that is long for its step is spread over
the GPU, whatever the host's bounds say. All of that is looked up while the kernel before may still run. A row of one
part is finished by its program. Of several, the program that comes last joins them, in their order: with m_i, l_i,
a_i the maximum, sum and weighted values of part i and m the largest m_i (or the sink),

    out = sum_i exp(m_i - m) a_i / (sum_i exp(m_i - m) l_i + exp(sinks[h] - m))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec
from model_states.attention.reference import attend_row, rows_of
from model_states.kernels.attention_parts import (
    dot_scores,
    find_part,
    finish,
    key_block,
    leave_part,
    searched_rows,
    softmax_step,
)
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.sizes import cdiv, next_power_of_2
from model_states.kernels.triton_import import tl, triton

_JOINED = 8192  # partial values that a program joins at a time


def paged_attention_decode_torch(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    short: int,
) -> None:
    """The formula above, one row at a time."""
    for row, token, query_len, seq_len in rows_of(metadata):
        if query_len <= short:
            q, blocks = query[token : token + query_len], metadata.block_table[row]
            result = attend_row(q, key_cache, value_cache, blocks, seq_len, spec, sinks)
            out[token : token + query_len] = result.to(out.dtype)
    if metadata.max_query_len <= short:
        out[int(metadata.query_start_loc[-1]) :] = 0


@triton.jit
def _keys_of_part(
    query_start_loc, seq_lens, num_reqs, window, row, part, part_len, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """First token, query_len, seq_len and number of parts of a row; first key and end of one part, or no keys."""
    found = row < num_reqs
    token = tl.load(query_start_loc + row, mask=found, other=0).to(tl.int64)
    query_len = (tl.load(query_start_loc + row + 1, mask=found, other=0) - token).to(tl.int32)
    seq_len = tl.load(seq_lens + row, mask=found, other=0)
    first = 0
    if window is not None:
        first = tl.maximum(seq_len - query_len - window + 1, 0)
    # The parts of a row are of one length, which may take fewer of them.
    span = tl.maximum(seq_len - first, 1)
    part_len = tl.cdiv(tl.cdiv(span, tl.cdiv(span, part_len)), BLOCK_N) * BLOCK_N
    start = first + part * part_len
    return token, query_len, seq_len, tl.cdiv(span, part_len), start, tl.minimum(start + part_len, seq_len)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "budget", "min_part", "num_stored", "window"])
def _paged_attention_decode_kernel(
    out,
    scratch,
    arrived,
    query,
    key_cache,
    value_cache,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    num_reqs,
    num_tokens,
    budget,
    min_part,
    num_stored,
    stored_size,
    window,
    table_stride,
    query_token_stride,
    query_head_stride,
    scale,
    soft_cap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SHORT: tl.constexpr,
    SEARCHED: tl.constexpr,
    VALUE_FROM_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # Heads are the fastest axis: the programs that run together read neighbouring memory.
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HEADS: tl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    CHUNKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    item = tl.program_id(1)
    kv_head = tl.program_id(0) // CHUNKS
    first_head = kv_head * GROUP + tl.program_id(0) % CHUNKS * BLOCK_M
    num_heads = tl.minimum(kv_head * GROUP + GROUP - first_head, HEADS)
    pairs = tl.arange(0, BLOCK_M)  # (query, head), the head fastest
    # Entries of the key that are the value as well are read once; d are the others.
    d = (HEAD_SIZE_V if VALUE_FROM_KEY else 0) + tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if PDL:
        gdc_launch_dependents()
    last_token = tl.load(query_start_loc + num_reqs)
    row, part, part_len = find_part(
        *(query_start_loc, seq_lens, num_reqs, window, item, budget, min_part, BLOCK_N, SHORT, SEARCHED)
    )
    token, query_len, seq_len, num_parts, start, end = _keys_of_part(
        query_start_loc, seq_lens, num_reqs, window, row, part, part_len, BLOCK_N
    )
    table = block_table + row.to(tl.int64) * table_stride
    n = start + tl.arange(0, BLOCK_N)
    block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0)
    if PDL:
        gdc_wait()
    # Where no other kernel clears the padding, there is a program for each of its tokens too.
    if (item >= last_token) & (item < num_tokens):
        finish(
            *(out + (item.to(tl.int64) * NUM_HEADS + first_head) * HEAD_SIZE_V, sinks, first_head, pairs),
            *(pairs < num_heads, maximum, total, acc, HEADS, NUM_HEADS, HEAD_SIZE_V, BLOCK_DV),
        )
    if start >= end:
        return
    own = (pairs < query_len * HEADS) & (pairs % HEADS < num_heads)
    positions = seq_len - query_len + tl.minimum(pairs // HEADS, query_len - 1)
    heads = query + token * query_token_stride + first_head * query_head_stride
    heads += (pairs // HEADS * query_token_stride + pairs % HEADS * query_head_stride)[:, None]
    q = tl.load(heads + d[None, :], mask=own[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
    q_v = q
    if VALUE_FROM_KEY:
        q_v = tl.load(heads + dv[None, :], mask=own[:, None] & (dv < HEAD_SIZE_V)[None, :], other=0.0)
    to_log2 = (scale if soft_cap is None else 1.0) * 1.4426950408889634
    for n0 in range(start, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = n < end
        cached = (block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        # Looked up one turn ahead, so that no load of keys or values waits for another load of its turn.
        block = tl.load(table + (n + BLOCK_N) // BLOCK_SIZE, mask=n + BLOCK_N < end, other=0)
        # What lies past the sequence may be NaN, which a weight of 0 would not silence: it is not read.
        loads = inside[:, None] & (d < HEAD_SIZE)[None, :]
        k = tl.load(key_cache + cached[:, None] * HEAD_SIZE + d[None, :], mask=loads, other=0.0)
        loads = inside[:, None] & (dv < HEAD_SIZE_V)[None, :]
        values = value_cache + cached[:, None] * (HEAD_SIZE if VALUE_FROM_KEY else HEAD_SIZE_V)
        v = tl.load(values + dv[None, :], mask=loads, other=0.0)
        scores = dot_scores(q, q_v, k, v, scale, soft_cap, VALUE_FROM_KEY, PRECISION)
        seen = inside[None, :] & (n[None, :] <= positions[:, None])
        if window is not None:
            seen = seen & (positions[:, None] - n[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, maximum, total = softmax_step(scores, maximum, total, to_log2)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)

    counter = arrived + row * tl.num_programs(0) + tl.program_id(0)
    leave_part(
        *(out + (token * NUM_HEADS + first_head) * HEAD_SIZE_V, sinks, first_head, scratch, counter),
        *(item, part, num_parts, num_stored, stored_size, pairs, own, num_heads, query_len * HEADS),
        *(maximum * to_log2, total, acc, HEADS, NUM_HEADS, HEAD_SIZE_V, BLOCK_DV, BLOCK_P, BLOCK_S),
    )


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is cut. Results differ by rounding alone.

    budget: parts of all rows at most, beyond one of each; min_part: keys of a part at least; block_m: (query, head)
    pairs of a program; block_n: keys that it takes at a time.
    """

    budget: int
    min_part: int
    block_n: int = 32
    num_warps: int = 4
    num_stages: int = 3
    block_m: int = 16


@cache
def decode_config(num_reqs: int, spec: AttentionSpec, itemsize: int) -> DecodeConfig:
    """A cut for a number of rows, head sizes, and the size of a cached element (bytes)."""
    size, group = max(spec.head_size, spec.head_size_v), spec.num_heads // spec.num_kv_heads
    # Where rows are few, heads that could share a program take one each, to spread over the GPU.
    few = num_reqs * spec.num_heads <= 512
    block_m = 16 if few or group <= 16 or (itemsize == 4 and size > 256) else min(64, next_power_of_2(group))
    # One program of the widest heads fills a multiprocessor; four of others do.
    budget = max(1, (132 if size > 256 else 528) // (spec.num_kv_heads * cdiv(group, block_m)))
    if size > 256:
        block_n, num_warps = (16 if itemsize == 4 else 32), (4 if block_m == 16 else 8)
        return DecodeConfig(budget, 128, block_n, num_warps, num_stages=2, block_m=block_m)
    if itemsize == 4:
        return DecodeConfig(budget, 128, block_n=16 if size > 128 else 32, num_stages=2, block_m=block_m)
    if few:
        return DecodeConfig(budget, 32, block_n=32, num_warps=2, block_m=block_m)
    many = num_reqs * spec.num_heads >= 2048
    if many and size <= 64 and block_m == 16:
        # Of 4 heads 256 rows of 172 keys took 15.2 us (64 keys and 4 warps 19.0), of 128 to 384 keys 23.3 (25.7).
        return DecodeConfig(budget, 256, block_n=16, num_warps=1)
    return DecodeConfig(budget, 256, block_n=64 if many and size <= 128 else 32, block_m=block_m)


def short_query_len(spec: AttentionSpec, config: DecodeConfig) -> int:
    """Queries of the longest row that the kernel takes: with all heads of a kv head they fill a program."""
    return max(1, config.block_m // (spec.num_heads // spec.num_kv_heads))


def _heads_axis(spec: AttentionSpec, config: DecodeConfig) -> int:
    return spec.num_kv_heads * cdiv(spec.num_heads // spec.num_kv_heads, config.block_m)


def _stored(max_query_len: int, spec: AttentionSpec, config: DecodeConfig) -> tuple[int, int]:
    """(query, head) pairs of the largest part, and its fp32 elements, rounded up to whole cache lines."""
    queries = min(max_query_len, short_query_len(spec, config))
    pairs = queries * min(spec.num_heads // spec.num_kv_heads, config.block_m)
    return pairs, cdiv(pairs * (spec.head_size_v + 2), 32) * 32


def _num_parts(metadata: AttentionMetadata, config: DecodeConfig) -> int:
    """As many parts as there may be."""
    num_reqs = metadata.seq_lens.shape[0]
    return min(num_reqs + config.budget, num_reqs * cdiv(metadata.max_seq_len, config.min_part))


def scratch_sizes(metadata: AttentionMetadata, spec: AttentionSpec, config: DecodeConfig) -> tuple[int, int]:
    """What a launch needs: fp32 elements, and int32 counters that are 0."""
    axis, (_, size) = _heads_axis(spec, config), _stored(metadata.max_query_len, spec, config)
    return _num_parts(metadata, config) * axis * size, metadata.seq_lens.shape[0] * axis


@cache
def _sizes(spec: AttentionSpec, config: DecodeConfig) -> dict[str, int]:
    block_dv = max(16, next_power_of_2(spec.head_size_v))
    group = next_power_of_2(min(spec.num_heads // spec.num_kv_heads, config.block_m))
    block_p = min(group, _JOINED // block_dv)
    return {
        "NUM_HEADS": spec.num_heads,
        "NUM_KV_HEADS": spec.num_kv_heads,
        "HEAD_SIZE": spec.head_size,
        "HEAD_SIZE_V": spec.head_size_v,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": key_block(spec),
        "BLOCK_DV": block_dv,
        "BLOCK_P": block_p,
        "BLOCK_S": max(1, min(32, _JOINED // (block_p * block_dv))),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def paged_attention_decode_triton(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    config: DecodeConfig,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """Launch over (heads, parts). scratch and arrived are as `scratch_sizes` says; arrived is left at 0."""
    num_reqs, num_tokens = metadata.seq_lens.shape[0], query.shape[0]
    short, num_parts = short_query_len(spec, config), _num_parts(metadata, config)
    stored, stored_size = _stored(metadata.max_query_len, spec, config)
    cleared = num_tokens if metadata.max_query_len <= short else 0
    _paged_attention_decode_kernel[_heads_axis(spec, config), max(num_parts, cleared)](
        *(out, scratch, arrived, query, key_cache, value_cache, metadata.query_start_loc, metadata.seq_lens),
        *(
            metadata.block_table,
            sinks,
            num_reqs,
            cleared,
            config.budget,
            config.min_part,
            stored,
            stored_size,
        ),
        *(spec.sliding_window, metadata.block_table.stride(0), query.stride(0), query.stride(1)),
        *(spec.scale, spec.soft_cap),
        BLOCK_SIZE=key_cache.shape[1],
        SHORT=short,
        SEARCHED=searched_rows(num_reqs),
        VALUE_FROM_KEY=spec.value_from_key,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **_sizes(spec, config),
        **programmatic_launch(query),
    )


def paged_attention_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    config: DecodeConfig,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """Attend with every row of 1 to short_query_len(spec, config) queries."""
    args = (out, query, key_cache, value_cache, metadata, spec, sinks)
    if use_triton(query):
        paged_attention_decode_triton(*args, config, scratch, arrived)
    else:
        paged_attention_decode_torch(*args, short_query_len(spec, config))
