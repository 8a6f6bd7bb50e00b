"""Paged attention of rows with one query, split over the keys.

For every row b with query_start_loc[b + 1] - query_start_loc[b] = 1, its token t and every head h:

    s[p]      = cap(scale * query[t, h] . key[b, p, h'])         for p in [max(0, seq_len - window), seq_len)
    out[t, h] = sum_p exp(s[p]) value[b, p, h'] / (sum_p exp(s[p]) + exp(sinks[h]))

with h' = h // (num_heads // num_kv_heads), cap(x) = soft_cap * tanh(x / soft_cap) and position p of row b at
block block_table[b, p // block_size], offset p % block_size. Tokens at or past query_start_loc[-1] get zeros.
Other rows are not touched. Shapes are those of `AttentionBackend.attend`; out is contiguous.

The keys of a row are cut into up to `num_splits` parts. The query heads of one kv head share a program, so that
each key is read once. A row of one part is finished by the first kernel, the second joins the others: with
m_i, l_i, a_i the maximum, sum and weighted values of part i and m the largest m_i (or the sink),

    out = sum_i exp(m_i - m) a_i / (sum_i exp(m_i - m) l_i + exp(sinks[h] - m))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec
from model_states.attention.reference import attend_row, rows_of
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_JOINED = 8  # parts that the second kernel joins at a time


def paged_attention_decode_torch(
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
        if query_len == 1:
            q, blocks = query[token : token + 1], metadata.block_table[row]
            out[token] = attend_row(q, key_cache, value_cache, blocks, seq_len, spec, sinks)[0].to(out.dtype)
    out[int(metadata.query_start_loc[-1]) :] = 0


@triton.jit
def soft_capped(scores, soft_cap) -> tl.tensor:
    """soft_cap * tanh(scores / soft_cap), by one exponential that may overflow to infinity."""
    return soft_cap * (1.0 - 2.0 / (tl.exp2(scores / soft_cap * 2.8853900817779268) + 1.0))


@triton.jit
def log2_scores(
    q,
    q_v,
    k,
    v,
    scale,
    soft_cap,
    VALUE_FROM_KEY: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """What exp2 takes for cap(scale * query . key); v [.., BLOCK_DV] are the key's first entries if VALUE_FROM_KEY."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if VALUE_FROM_KEY:
        scores = tl.dot(q_v, tl.trans(v), scores, input_precision=PRECISION)
    scores *= scale
    if HAS_SOFT_CAP:
        scores = soft_capped(scores, soft_cap)
    return scores * 1.4426950408889634


@triton.jit
def with_sink(sink, maximum, total, acc) -> tuple[tl.tensor, tl.tensor]:
    """Sum and weighted values once the sink logit has joined the softmax."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new_maximum = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - new_maximum)
    return total * shrink + tl.exp2(sink - new_maximum), acc * shrink[:, None]


@triton.jit
def _part_len(span, num_splits, min_split, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Keys of a part when `span` keys are cut into up to num_splits parts of min_split or more."""
    parts = tl.maximum(tl.minimum(num_splits, tl.cdiv(span, min_split)), 1)
    return tl.maximum(tl.cdiv(tl.cdiv(span, parts), BLOCK_N), 1) * BLOCK_N


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_splits", "min_split", "window"])
def _paged_attention_decode_kernel(
    out,
    part_out,
    part_max,
    part_sum,
    query,
    key_cache,
    value_cache,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    num_reqs,
    num_tokens,
    num_splits,
    min_split,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_FROM_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # Heads are the fastest axis: the programs that run together read neighbouring memory.
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    CHUNKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0) // CHUNKS
    row = tl.program_id(1)
    split = tl.program_id(2)
    in_group = tl.program_id(0) % CHUNKS * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + in_group
    # Entries of the key that are the value as well are read once; d are the others.
    d = (HEAD_SIZE_V if VALUE_FROM_KEY else 0) + tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    writes = (in_group < GROUP)[:, None] & (dv < HEAD_SIZE_V)[None, :]
    out_offsets = heads[:, None] * HEAD_SIZE_V + dv[None, :]

    # The grid may have more "rows" than the step, one for each padding token.
    if (split == 0) & (row >= tl.load(query_start_loc + num_reqs)) & (row < num_tokens):
        zeros = tl.zeros([BLOCK_M, BLOCK_DV], out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * (NUM_HEADS * HEAD_SIZE_V) + out_offsets, zeros, mask=writes)
    if row >= num_reqs:
        return
    token = tl.load(query_start_loc + row).to(tl.int64)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + row)
    first = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
    part_len = _part_len(seq_len - first, num_splits, min_split, BLOCK_N)
    start = first + split * part_len
    if (split > 0) & (start >= seq_len):
        return
    end = tl.minimum(start + part_len, seq_len)

    reads = (in_group < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    offsets = heads[:, None] * query_head_stride + d[None, :]
    q = tl.load(query + token * query_token_stride + offsets, mask=reads, other=0.0)
    q_v = q
    if VALUE_FROM_KEY:
        offsets = token * query_token_stride + heads[:, None] * query_head_stride + dv[None, :]
        q_v = tl.load(query + offsets, mask=writes, other=0.0)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = block_table + row.to(tl.int64) * table_stride
    for n0 in range(start, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = n < end
        block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        cached = (block * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        # What lies past the sequence may be NaN, which a weight of 0 would not silence: it is not read.
        loads = (d < HEAD_SIZE)[:, None] & inside[None, :]
        k = tl.load(key_cache + cached[None, :] * HEAD_SIZE + d[:, None], mask=loads, other=0.0)
        loads = inside[:, None] & (dv < HEAD_SIZE_V)[None, :]
        values = value_cache + cached[:, None] * (HEAD_SIZE if VALUE_FROM_KEY else HEAD_SIZE_V)
        v = tl.load(values + dv[None, :], mask=loads, other=0.0)
        scores = log2_scores(q, q_v, k, v, scale, soft_cap, VALUE_FROM_KEY, HAS_SOFT_CAP, PRECISION)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        maximum = new_maximum

    if first + part_len >= seq_len:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=in_group < GROUP, other=0.0)
            total, acc = with_sink(sink, maximum, total, acc)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + token * (NUM_HEADS * HEAD_SIZE_V) + out_offsets
        tl.store(target, result.to(out.dtype.element_ty), mask=writes)
    else:
        part = (row.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(part_out + part[:, None] * HEAD_SIZE_V + dv[None, :], acc, mask=writes)
        tl.store(part_max + part, maximum, mask=in_group < GROUP)
        tl.store(part_sum + part, total, mask=in_group < GROUP)


@triton.jit(do_not_specialize=["num_splits", "min_split", "window"])
def _join_parts_kernel(
    out,
    part_out,
    part_max,
    part_sum,
    query_start_loc,
    seq_lens,
    sinks,
    num_splits,
    min_split,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(query_start_loc + row).to(tl.int64)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + row)
    span = tl.minimum(seq_len, window) if HAS_WINDOW else seq_len
    part_len = _part_len(span, num_splits, min_split, BLOCK_N)
    if part_len >= span:
        return
    dv = tl.arange(0, BLOCK_DV)
    first = (row.to(tl.int64) * NUM_HEADS + head) * num_splits
    if HAS_SINKS:
        maximum = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = maximum * 0.0 + 1.0
    else:
        maximum = tl.load(part_max + first)
        total = maximum * 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for s0 in range(0, tl.cdiv(span, part_len), BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        inside = s * part_len < span
        maxima = tl.load(part_max + first + s, mask=inside, other=float("-inf"))
        sums = tl.load(part_sum + first + s, mask=inside, other=0.0)
        loads = inside[:, None] & (dv < HEAD_SIZE_V)[None, :]
        values = tl.load(part_out + (first + s)[:, None] * HEAD_SIZE_V + dv[None, :], mask=loads, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(maxima - new_maximum)
        total = total * shrink + tl.sum(sums * weights, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        maximum = new_maximum
    target = out + token * (NUM_HEADS * HEAD_SIZE_V) + head * HEAD_SIZE_V + dv
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=dv < HEAD_SIZE_V)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is cut. Results differ by rounding alone.

    num_splits: parts of a row at most; min_split: keys of a part at least; block_m: heads of a program at most;
    block_n: keys that it takes at a time.
    """

    num_splits: int
    min_split: int
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    block_m: int = 64


def decode_config(num_reqs: int, spec: AttentionSpec, max_seq_len: int, itemsize: int) -> DecodeConfig:
    """A cut that fills a large GPU, from host bounds alone; kernels take a row's own length on the device.

    itemsize: bytes of a cached element.
    """
    size, group = max(spec.head_size, spec.head_size_v), spec.num_heads // spec.num_kv_heads
    block_m = 16 if itemsize == 4 and size > 256 else 64
    programs = max(1, num_reqs * spec.num_kv_heads * triton.cdiv(group, block_m))
    # Splitting a full GPU further pays only where one long row would outlast all others.
    min_split = 128 if programs <= 512 else 512
    span = max_seq_len if spec.sliding_window is None else min(max_seq_len, spec.sliding_window)
    # One program of the widest heads fills a multiprocessor, and its parts are the most scratch.
    enough = 512 if size > 256 else 4096
    num_splits = max(1, min(enough // programs, triton.cdiv(span, min_split), 64))
    wide = size > 128
    if size > 256:
        block_n, num_warps = (16 if itemsize == 4 else 32), (4 if min(group, block_m) <= 16 else 8)
        return DecodeConfig(num_splits, min_split, block_n, num_warps, num_stages=2, block_m=block_m)
    if itemsize == 4:
        return DecodeConfig(num_splits, min_split, block_n=16 if wide else 32, num_stages=2)
    return DecodeConfig(num_splits, min_split, block_n=32 if wide else 64)


def key_block(spec: AttentionSpec) -> int:
    """Entries of a key that are not the value as well, rounded up to what a matrix product takes."""
    size = spec.head_size - (spec.head_size_v if spec.value_from_key else 0)
    return int(max(16, triton.next_power_of_2(size)))


def scratch_size(num_reqs: int, spec: AttentionSpec, config: DecodeConfig) -> int:
    """fp32 elements of scratch that a launch needs; 0 where no row is split."""
    return _num_parts(num_reqs, spec, config) * (spec.head_size_v + 2)


def _num_parts(num_reqs: int, spec: AttentionSpec, config: DecodeConfig) -> int:
    parts = num_reqs * spec.num_heads * config.num_splits if config.num_splits > 1 else 0
    return -(-parts // 4) * 4  # keeps every array of the scratch aligned to 16 bytes


def paged_attention_decode_triton(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    scratch: torch.Tensor,
    config: DecodeConfig,
) -> None:
    """Launch over (kv heads, rows, splits), then join the parts.

    scratch: fp32 [scratch_size(..)] or longer. With metadata.max_query_len 1 every padding token is cleared.
    """
    num_reqs, num_tokens = metadata.seq_lens.shape[0], query.shape[0]
    group = spec.num_heads // spec.num_kv_heads
    block_m = min(config.block_m, max(16, triton.next_power_of_2(group)))
    parts = _num_parts(num_reqs, spec, config)
    part_out, part_max, part_sum = scratch[2 * parts :], scratch[:parts], scratch[parts : 2 * parts]
    lengths = (metadata.query_start_loc, metadata.seq_lens)
    limits = (config.num_splits, config.min_split, spec.sliding_window or 0)
    sinks_or_any = sinks if sinks is not None else query
    shared = {
        "NUM_HEADS": spec.num_heads,
        "HEAD_SIZE_V": spec.head_size_v,
        "BLOCK_N": config.block_n,
        "BLOCK_DV": max(16, triton.next_power_of_2(spec.head_size_v)),
        "HAS_WINDOW": spec.sliding_window is not None,
        "HAS_SINKS": sinks is not None,
    }
    rows = max(num_reqs, num_tokens) if metadata.max_query_len == 1 else num_reqs
    grid = (spec.num_kv_heads * triton.cdiv(group, block_m), rows, config.num_splits)
    _paged_attention_decode_kernel[grid](
        *(out, part_out, part_max, part_sum, query, key_cache, value_cache, *lengths),
        *(metadata.block_table, sinks_or_any, num_reqs, num_tokens, *limits),
        *(
            metadata.block_table.stride(0),
            query.stride(0),
            query.stride(1),
            spec.scale,
            float(spec.soft_cap or 0),
        ),
        NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_SIZE=spec.head_size,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_M=block_m,
        BLOCK_D=key_block(spec),
        HAS_SOFT_CAP=spec.soft_cap is not None,
        VALUE_FROM_KEY=spec.value_from_key,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **shared,
    )
    if config.num_splits > 1:
        parts_args = (out, part_out, part_max, part_sum, *lengths, sinks_or_any, *limits)
        _join_parts_kernel[(spec.num_heads, num_reqs)](*parts_args, BLOCK_S=_JOINED, num_warps=2, **shared)


def paged_attention_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    scratch: torch.Tensor,
    config: DecodeConfig,
) -> None:
    """Attend with every row of one query; scratch and config matter to the kernel alone."""
    if use_triton(query):
        paged_attention_decode_triton(
            out, query, key_cache, value_cache, metadata, spec, sinks, scratch, config
        )
    else:
        paged_attention_decode_torch(out, query, key_cache, value_cache, metadata, spec, sinks)
