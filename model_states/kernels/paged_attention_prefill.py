"""Paged attention of rows with several queries, in the manner of flash attention.

For every row b with query_len = query_start_loc[b + 1] - query_start_loc[b] > 1, its query i at token
t = query_start_loc[b] + i and position q = seq_lens[b] - query_len + i, and every head h:

    s[p]      = cap(scale * query[t, h] . key[b, p, h'])                       for p in (q - window, q]
    out[t, h] = sum_p exp(s[p]) value[b, p, h'] / (sum_p exp(s[p]) + exp(sinks[h]))

with h', cap and the place of position p as in `paged_attention_decode`. Tokens at or past query_start_loc[-1]
get zeros. Rows of one query are not touched. Shapes as in `AttentionBackend.attend`; out is contiguous.

The queries are cut into tiles of `tile` tokens of one row: tile j of row b is program
query_start_loc[b] // tile + b + j. These ranges never overlap, so num_tokens // tile + num_reqs programs are
enough for whatever the lengths are, and the grid depends on padded sizes alone. Query heads of one kv head
share a program where their number is even.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec
from model_states.attention.reference import attend_row, rows_of
from model_states.kernels.dispatch import use_triton
from model_states.kernels.paged_attention_decode import key_block, log2_scores, with_sink
from model_states.kernels.triton_import import tl, triton

_SEARCHED = 256  # rows that a program looks through at a time


def paged_attention_prefill_torch(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> None:
    """The formula above, one row at a time."""
    for row, token, query_len, seq_len in rows_of(metadata):
        if query_len > 1:
            q, blocks = query[token : token + query_len], metadata.block_table[row]
            result = attend_row(q, key_cache, value_cache, blocks, seq_len, spec, sinks)
            out[token : token + query_len] = result.to(out.dtype)
    out[int(metadata.query_start_loc[-1]) :] = 0


@triton.jit
def _row_of_tile(query_start_loc, num_reqs, tile, TILE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The last row whose first tile is not after `tile`."""
    row = tile * 0 - 1
    for r0 in range(0, num_reqs, BLOCK):
        rows = r0 + tl.arange(0, BLOCK)
        starts = tl.load(query_start_loc + rows, mask=rows < num_reqs, other=0)
        reached = (rows < num_reqs) & (starts // TILE + rows <= tile)
        row += tl.sum(reached.to(tl.int32), 0)
    return row


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
    SEARCHED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_FROM_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    TILE: tl.constexpr = BLOCK_M // PACK
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # The last tiles of a long row see the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_head = tl.program_id(1) * PACK
    kv_head = first_head // GROUP
    m = tl.arange(0, BLOCK_M)
    heads = first_head + m % PACK
    # Entries of the key that are the value as well are read once; d are the others.
    d = (HEAD_SIZE_V if VALUE_FROM_KEY else 0) + tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    out_offsets = heads[:, None] * HEAD_SIZE_V + dv[None, :]

    last_token = tl.load(query_start_loc + num_reqs)
    if (tile * TILE + TILE > last_token) & (tile * TILE < num_tokens):
        tokens = tile * TILE + m // PACK
        padding = (tokens >= last_token) & (tokens < num_tokens)
        zeros = tl.zeros([BLOCK_M, BLOCK_DV], out.dtype.element_ty)
        target = out + tokens.to(tl.int64)[:, None] * (NUM_HEADS * HEAD_SIZE_V) + out_offsets
        tl.store(target, zeros, mask=padding[:, None] & (dv < HEAD_SIZE_V)[None, :])
    row = _row_of_tile(query_start_loc, num_reqs, tile, TILE, SEARCHED)
    start_token = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start_token
    first_query = (tile - start_token // TILE - row) * TILE
    if (query_len < 2) | (first_query >= query_len):
        return

    in_row = first_query + m // PACK
    tokens = (start_token + in_row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    first_position = seq_len - query_len + first_query
    positions = first_position + m // PACK
    end = tl.minimum(first_position + TILE, seq_len)
    reads = (in_row < query_len)[:, None] & (d < HEAD_SIZE)[None, :]
    offsets = tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + d[None, :]
    q = tl.load(query + offsets, mask=reads, other=0.0)
    writes = (in_row < query_len)[:, None] & (dv < HEAD_SIZE_V)[None, :]
    q_v = q
    if VALUE_FROM_KEY:
        offsets = tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + dv[None, :]
        q_v = tl.load(query + offsets, mask=writes, other=0.0)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = block_table + row.to(tl.int64) * table_stride
    first = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
    # Keys up to the tile's first query are seen by all its queries: no mask, unless there is a window.
    PHASES: tl.constexpr = 1 if HAS_WINDOW else 2
    diagonal = first // BLOCK_N * BLOCK_N if HAS_WINDOW else (first_position + 1) // BLOCK_N * BLOCK_N
    for phase in tl.static_range(PHASES):
        for n0 in range(
            diagonal if phase == PHASES - 1 else 0, end if phase == PHASES - 1 else diagonal, BLOCK_N
        ):
            n = n0 + tl.arange(0, BLOCK_N)
            # What no query sees may be NaN, which a weight of 0 would not silence: it is not read.
            inside = (n >= first) & (n < end)
            block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            cached = (block * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
            loads = (d < HEAD_SIZE)[:, None] & inside[None, :]
            k = tl.load(key_cache + cached[None, :] * HEAD_SIZE + d[:, None], mask=loads, other=0.0)
            loads = inside[:, None] & (dv < HEAD_SIZE_V)[None, :]
            values = value_cache + cached[:, None] * (HEAD_SIZE if VALUE_FROM_KEY else HEAD_SIZE_V)
            v = tl.load(values + dv[None, :], mask=loads, other=0.0)
            scores = log2_scores(q, q_v, k, v, scale, soft_cap, VALUE_FROM_KEY, HAS_SOFT_CAP, PRECISION)
            if phase == PHASES - 1:
                distance = positions[:, None] - n[None, :]
                seen = (distance >= 0) & inside[None, :]
                if HAS_WINDOW:
                    seen = seen & (distance < window)
                scores = tl.where(seen, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            # A query may see none of its tile's first keys; its maximum is -inf then, and -inf - -inf NaN.
            finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - finite[:, None])
            shrink = tl.exp2(maximum - finite)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            maximum = new_maximum

    if HAS_SINKS:
        total, acc = with_sink(tl.load(sinks + heads), maximum, total, acc)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + tokens[:, None] * (NUM_HEADS * HEAD_SIZE_V) + out_offsets
    tl.store(target, result.to(out.dtype.element_ty), mask=writes)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the work is cut.

    block_m: (query, packed head) pairs of a program; block_n: keys that it takes at a time.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(max_query_len: int, spec: AttentionSpec, itemsize: int) -> PrefillConfig:
    """A cut for head sizes and element size (bytes), smaller where even the longest row has few queries."""
    size = max(spec.head_size, spec.head_size_v)
    if itemsize == 4:
        # fp32 products run on the plain cores, unrolled: larger tiles spill and take long to compile.
        block = 32 if size <= 64 else 16
        return PrefillConfig(block, block, num_warps=4, num_stages=2)
    pairs = max_query_len * packed_heads(spec)
    if pairs <= 16:
        return PrefillConfig(16, 32 if size > 128 else 64, num_warps=4, num_stages=3)
    if size > 256:
        return PrefillConfig(64, 32, num_warps=8, num_stages=2)
    if size > 128:
        return PrefillConfig(128, 32, num_warps=8, num_stages=2)
    if pairs <= 64:
        return PrefillConfig(64, 64, num_warps=4, num_stages=3)
    return PrefillConfig(128, 64, num_warps=8, num_stages=3)


def packed_heads(spec: AttentionSpec) -> int:
    """Query heads of a program: the largest power of two that divides those of one kv head, up to 8."""
    group = spec.num_heads // spec.num_kv_heads
    return min(8, group & -group)


def paged_attention_prefill_triton(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    config: PrefillConfig,
) -> None:
    """Launch over (tiles of queries, head packs)."""
    num_reqs, num_tokens = metadata.seq_lens.shape[0], query.shape[0]
    pack = packed_heads(spec)
    grid = (num_tokens // (config.block_m // pack) + num_reqs, spec.num_heads // pack)
    _paged_attention_prefill_kernel[grid](
        *(
            out,
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
        ),
        *(sinks if sinks is not None else query, num_reqs, num_tokens, spec.sliding_window or 0),
        *(
            metadata.block_table.stride(0),
            query.stride(0),
            query.stride(1),
            spec.scale,
            float(spec.soft_cap or 0),
        ),
        NUM_HEADS=spec.num_heads,
        NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_SIZE=spec.head_size,
        HEAD_SIZE_V=spec.head_size_v,
        BLOCK_SIZE=key_cache.shape[1],
        PACK=pack,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=key_block(spec),
        BLOCK_DV=max(16, triton.next_power_of_2(spec.head_size_v)),
        SEARCHED=_SEARCHED,
        HAS_WINDOW=spec.sliding_window is not None,
        HAS_SOFT_CAP=spec.soft_cap is not None,
        HAS_SINKS=sinks is not None,
        VALUE_FROM_KEY=spec.value_from_key,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def paged_attention_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    config: PrefillConfig,
) -> None:
    """Attend with every row of several queries; config matters to the kernel alone."""
    if use_triton(query):
        paged_attention_prefill_triton(out, query, key_cache, value_cache, metadata, spec, sinks, config)
    else:
        paged_attention_prefill_torch(out, query, key_cache, value_cache, metadata, spec, sinks)
