"""Paged attention of rows with many queries, in the manner of flash attention.

For every row b with query_len = query_start_loc[b + 1] - query_start_loc[b] > short, its query i at token
t = query_start_loc[b] + i and position q = seq_lens[b] - query_len + i, and every head h:

    s[p]      = cap(scale * query[t, h] . key[b, p, h'])                       for p in (q - window, q]
    out[t, h] = sum_p exp(s[p]) value[b, p, h'] / (sum_p exp(s[p]) + exp(sinks[h]))

with h', cap and the place of position p as in `paged_attention_decode`. Tokens at or past query_start_loc[-1]
get zeros. Shorter rows are not touched. Shapes as in `AttentionBackend.attend`; out is contiguous.

The queries are cut into tiles of tokens of one row, numbered over all rows. Query heads of one kv head share a
program where their number is even. A program looks for its tile on the device and goes on with the next one that is
nobody's, so the grid is that of full tiles: neither padding nor rows that are not this kernel's launch programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec
from model_states.attention.reference import attend_row, rows_of
from model_states.kernels.attention_parts import (
    dot_scores,
    find_tile,
    key_block,
    searched_rows,
    softmax_step,
    with_sink,
)
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.sizes import cdiv, next_power_of_2
from model_states.kernels.triton_import import tl, triton

_FILL = 264  # programs that run at once on a large GPU


def paged_attention_prefill_torch(
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
        if query_len > short:
            q, blocks = query[token : token + query_len], metadata.block_table[row]
            result = attend_row(q, key_cache, value_cache, blocks, seq_len, spec, sinks)
            out[token : token + query_len] = result.to(out.dtype)
    out[int(metadata.query_start_loc[-1]) :] = 0


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "window"])
def _paged_attention_prefill_kernel(
    out,
    query,
    key_cache,
    value_cache,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    num_reqs,
    num_tokens,
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
    PACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OFFSETS: tl.constexpr,
    SHORT: tl.constexpr,
    SEARCHED: tl.constexpr,
    VALUE_FROM_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    TILE: tl.constexpr = BLOCK_M // PACK
    FIRST_D: tl.constexpr = HEAD_SIZE_V if VALUE_FROM_KEY else 0
    heads = tl.program_id(0) * PACK + tl.arange(0, BLOCK_M) % PACK
    kv_head = tl.program_id(0) * PACK // (NUM_HEADS // NUM_KV_HEADS)
    in_tile = tl.arange(0, BLOCK_M) // PACK
    # Entries of the key that are the value as well are read once; d are the others.
    d = FIRST_D + tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    to_log2 = (scale if soft_cap is None else 1.0) * 1.4426950408889634

    if PDL:
        gdc_launch_dependents()
    item = tl.program_id(1)
    row, index = find_tile(query_start_loc, num_reqs, item, TILE, SHORT, SEARCHED)
    if PDL:
        gdc_wait()
    while row < num_reqs:
        start_token = tl.load(query_start_loc + row)
        query_len = tl.load(query_start_loc + row + 1) - start_token
        # The last tiles of a row see the most keys, so they start first.
        first_query = (tl.cdiv(query_len, TILE) - 1 - index) * TILE
        first_position = tl.load(seq_lens + row) - query_len + first_query
        end = first_position + tl.minimum(TILE, query_len - first_query)
        positions = first_position + in_tile
        tokens = (start_token + first_query + in_tile).to(tl.int64)
        real = positions < end
        # Looked up before the query is waited for.
        table = block_table + row.to(tl.int64) * table_stride
        first = 0
        if window is not None:
            first = tl.maximum(first_position - window + 1, 0)
        n = first + tl.arange(0, BLOCK_N)
        block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0)
        places = query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride
        q = tl.load(places + d[None, :], mask=real[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
        writes = real[:, None] & (dv < HEAD_SIZE_V)[None, :]
        q_v = q
        if VALUE_FROM_KEY:
            q_v = tl.load(places + dv[None, :], mask=writes, other=0.0)
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for n0 in range(first, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            cached = (block.to(OFFSETS) * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
            # Looked up one turn ahead, so that no load of keys or values waits for another load of its turn.
            block = tl.load(table + (n + BLOCK_N) // BLOCK_SIZE, mask=n + BLOCK_N < end, other=0)
            # Scores of keys past the tile are dropped whatever they are, and a mask would cost registers.
            keys = key_cache + cached[:, None] * HEAD_SIZE + d[None, :]
            if FIRST_D + BLOCK_D == HEAD_SIZE:
                k = tl.load(keys)
            else:
                k = tl.load(keys, mask=(d < HEAD_SIZE)[None, :], other=0.0)
            # A weight of 0 would not silence a NaN among the values: what no query sees is not read.
            loads = (n < end)[:, None] & (dv < HEAD_SIZE_V)[None, :]
            values = value_cache + cached[:, None] * (HEAD_SIZE if VALUE_FROM_KEY else HEAD_SIZE_V)
            v = tl.load(values + dv[None, :], mask=loads, other=0.0)
            scores = dot_scores(q, q_v, k, v, scale, soft_cap, VALUE_FROM_KEY, PRECISION)
            # Keys before the tile's first query are seen by all of its queries, unless there is a window.
            if window is not None:
                distance = positions[:, None] - n[None, :]
                scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
            elif n0 + BLOCK_N > first_position + 1:
                scores = tl.where(positions[:, None] >= n[None, :], scores, float("-inf"))
            weights, shrink, maximum, total = softmax_step(scores, maximum, total, to_log2)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)

        if sinks is not None:
            total, acc = with_sink(tl.load(sinks + heads), maximum * to_log2, total, acc)
        target = out + (tokens * NUM_HEADS + heads)[:, None] * HEAD_SIZE_V + dv[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=writes)
        item += tl.num_programs(1)
        row = num_reqs
        if item < num_tokens // TILE + tl.minimum(num_reqs, num_tokens // (SHORT + 1)):
            row, index = find_tile(query_start_loc, num_reqs, item, TILE, SHORT, SEARCHED)

    last_token = tl.load(query_start_loc + num_reqs)
    for tile in range(tl.program_id(1), tl.cdiv(num_tokens, TILE), tl.num_programs(1)):
        if tile * TILE + TILE > last_token:
            tokens = tile * TILE + in_tile
            target = out + (tokens.to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_SIZE_V + dv[None, :]
            padding = ((tokens >= last_token) & (tokens < num_tokens))[:, None] & (dv < HEAD_SIZE_V)[None, :]
            tl.store(target, tl.zeros([BLOCK_M, BLOCK_DV], out.dtype.element_ty), mask=padding)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the work is cut. Results differ by rounding alone.

    block_m: (query, packed head) pairs of a program; block_n: keys that it takes at a time; max_registers: of a
    thread, to let more programs run at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def prefill_config(max_query_len: int, spec: AttentionSpec, itemsize: int) -> PrefillConfig:
    """A cut for a bound of the longest row, head sizes, and the size of a cached element (bytes)."""
    size = max(spec.head_size, spec.head_size_v)
    if itemsize == 4:
        # fp32 products run on the plain cores, unrolled: larger tiles spill and take long to compile.
        block = 32 if size <= 64 else 16
        return PrefillConfig(block, block, num_warps=4, num_stages=2)
    if size > 256:
        return PrefillConfig(64, 32, num_warps=8, num_stages=2)
    if size > 128:
        return PrefillConfig(128, 32, num_warps=8, num_stages=2)
    if max_query_len <= 256:
        # A program has a few turns only, so what counts is how many programs run at once.
        return PrefillConfig(64, 32, num_warps=4, num_stages=3, max_registers=168)
    if max_query_len <= 2048:
        return PrefillConfig(64, 64, num_warps=4, num_stages=3)
    return PrefillConfig(128, 64, num_warps=8, num_stages=3)


def packed_heads(spec: AttentionSpec) -> int:
    """Query heads of a program: the largest power of two that divides those of one kv head, up to 8."""
    group = spec.num_heads // spec.num_kv_heads
    return min(8, group & -group)


def _grid(
    num_reqs: int, num_tokens: int, spec: AttentionSpec, config: PrefillConfig, short: int
) -> tuple[int, int]:
    """(head packs, programs of one pack): as many as there may be tiles, but few more than full tiles need."""
    packs, tile = spec.num_heads // packed_heads(spec), config.block_m // packed_heads(spec)
    tiles = num_tokens // tile + min(num_reqs, num_tokens // (short + 1))
    return packs, max(1, min(tiles, max(cdiv(num_tokens, tile), cdiv(_FILL, packs))))


@cache
def _sizes(spec: AttentionSpec, config: PrefillConfig) -> dict[str, int | None]:
    return {
        "NUM_HEADS": spec.num_heads,
        "NUM_KV_HEADS": spec.num_kv_heads,
        "HEAD_SIZE": spec.head_size,
        "HEAD_SIZE_V": spec.head_size_v,
        "PACK": packed_heads(spec),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": key_block(spec),
        "BLOCK_DV": max(16, next_power_of_2(spec.head_size_v)),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": config.max_registers,
    }


def paged_attention_prefill_triton(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    short: int,
    config: PrefillConfig,
) -> None:
    """Launch over (head packs, tiles of queries)."""
    num_reqs, num_tokens = metadata.seq_lens.shape[0], query.shape[0]
    _paged_attention_prefill_kernel[_grid(num_reqs, num_tokens, spec, config, short)](
        *(out, query, key_cache, value_cache, metadata.query_start_loc, metadata.seq_lens),
        *(metadata.block_table, sinks, num_reqs, num_tokens, spec.sliding_window),
        *(metadata.block_table.stride(0), query.stride(0), query.stride(1), spec.scale, spec.soft_cap),
        BLOCK_SIZE=key_cache.shape[1],
        OFFSETS=tl.int32 if key_cache.numel() < 2**31 else tl.int64,
        SHORT=short,
        SEARCHED=searched_rows(num_reqs),
        VALUE_FROM_KEY=spec.value_from_key,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **_sizes(spec, config),
        **programmatic_launch(query),
    )


def paged_attention_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    short: int,
    config: PrefillConfig,
) -> None:
    """Attend with every row of more than `short` queries; config matters to the kernel alone."""
    args = (out, query, key_cache, value_cache, metadata, spec, sinks, short)
    if use_triton(query):
        paged_attention_prefill_triton(*args, config)
    else:
        paged_attention_prefill_torch(*args)
