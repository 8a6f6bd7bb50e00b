"""What the paged attention kernels share: who does which part of a step, softmax, and the joining of parts.

Work is numbered over all rows of a step and found on the device, so that a grid depends on padded sizes alone and
what it has too much exits at once. Both searches read every row's length, some rows at a time.
"""

from __future__ import annotations

from model_states.attention.interface import AttentionSpec
from model_states.kernels.sizes import next_power_of_2
from model_states.kernels.triton_import import tl, triton


@triton.jit
def _query_lens(query_start_loc, rows, num_reqs) -> tl.tensor:
    """Queries of each of `rows`, 0 past the last row."""
    ends = tl.load(query_start_loc + rows + 1, mask=rows < num_reqs, other=0)
    return ends - tl.load(query_start_loc + rows, mask=rows < num_reqs, other=0)


@triton.jit
def _spans(query_start_loc, seq_lens, rows, num_reqs, window, SHORT: tl.constexpr) -> tl.tensor:
    """Keys that each of `rows` reads, 0 for a row of no query or of more than SHORT."""
    query_len = _query_lens(query_start_loc, rows, num_reqs)
    span = tl.load(seq_lens + rows, mask=rows < num_reqs, other=0)
    if window is not None:
        span = tl.minimum(span, window + query_len - 1)
    return tl.where((query_len > 0) & (query_len <= SHORT), span, 0)


@triton.jit
def _add(a, b, c, x, y, z) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    return a + x, b + y, c + z


@triton.jit
def _sum_up(keys, longest, count, end, a, b, c, d) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    return keys + a, tl.maximum(longest, b), count + c, tl.maximum(end, d)


@triton.jit
def _pass(counts, item, row, before, passed) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go past the rows, of `counts` items each, whose items all come before `item`; `passed` items came earlier."""
    behind = passed + tl.cumsum(counts, 0) <= item
    rows, items, all_items = tl.reduce((behind.to(tl.int32), tl.where(behind, counts, 0), counts), 0, _add)
    return row + rows, before + items, passed + all_items


@triton.jit
def find_part(
    query_start_loc,
    seq_lens,
    num_reqs,
    window,
    item,
    budget,
    min_part,
    BLOCK_N: tl.constexpr,
    SHORT: tl.constexpr,
    SEARCHED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Row of part `item`, its number in the row, and keys of a part; past the last part the row is num_reqs or more.

    Rows of 1 to SHORT queries are cut into parts of max(min_part, keys of all such rows / budget) keys, rounded up
    to BLOCK_N: never more than num_reqs + budget parts. Where all of them come first and none is cut, as in most decode
    steps, parts are numbered as rows are, and there is nothing to search.
    """
    keys, longest, count, end = item * 0, item * 0, item * 0, item * 0
    for r0 in range(0, num_reqs, SEARCHED):
        rows = r0 + tl.arange(0, SEARCHED)
        span = _spans(query_start_loc, seq_lens, rows, num_reqs, window, SHORT)
        has = span > 0
        # One reduction, since each is a barrier or two that every program waits for.
        found = tl.reduce((span, span, has.to(tl.int32), tl.where(has, rows + 1, 0)), 0, _sum_up)
        keys, longest, count, end = _sum_up(keys, longest, count, end, found[0], found[1], found[2], found[3])
    part_len = tl.cdiv(tl.maximum(tl.cdiv(keys, budget), min_part), BLOCK_N) * BLOCK_N
    row, before, passed = item, item, item * 0
    if (longest > part_len) | (count < end):
        row, before = item * 0, item * 0
        for r0 in range(0, num_reqs, SEARCHED):
            rows = r0 + tl.arange(0, SEARCHED)
            span = _spans(query_start_loc, seq_lens, rows, num_reqs, window, SHORT)
            row, before, passed = _pass(tl.cdiv(span, part_len), item, row, before, passed)
    elif item >= end:
        row = item * 0 + num_reqs
    return row, item - before, part_len


@triton.jit
def find_tile(
    query_start_loc, num_reqs, item, TILE: tl.constexpr, SHORT: tl.constexpr, SEARCHED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Row of tile `item` and its number in the row; past the last tile the row is num_reqs or more.

    Rows of more than SHORT queries are cut into tiles of TILE queries.
    """
    row, before, passed = item * 0, item * 0, item * 0
    for r0 in range(0, num_reqs, SEARCHED):
        rows = r0 + tl.arange(0, SEARCHED)
        query_len = _query_lens(query_start_loc, rows, num_reqs)
        tiles = tl.where(query_len > SHORT, tl.cdiv(query_len, TILE), 0)
        row, before, passed = _pass(tiles, item, row, before, passed)
    return row, item - before


@triton.jit
def _soft_capped(scores, soft_cap) -> tl.tensor:
    """soft_cap * tanh(scores / soft_cap), by one exponential that may overflow to infinity."""
    return soft_cap * (1.0 - 2.0 / (tl.exp2(scores / soft_cap * 2.8853900817779268) + 1.0))


@triton.jit
def dot_scores(
    q,
    q_v,
    k,
    v,
    scale,
    soft_cap,
    VALUE_FROM_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """query . key, or cap(scale * query . key) with a soft cap; if VALUE_FROM_KEY v [.., BLOCK_DV] begins the key."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if VALUE_FROM_KEY:
        scores = tl.dot(q_v, tl.trans(v), scores, input_precision=PRECISION)
    if soft_cap is not None:
        scores = _soft_capped(scores * scale, soft_cap)
    return scores


@triton.jit
def softmax_step(scores, maximum, total, to_log2) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Weights of `scores` along axis 1, what shrinks earlier ones, and the new maximum and sum of all."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # Where nothing was seen yet the maximum is -inf, and -inf - -inf NaN.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) * to_log2
    weights = tl.exp2(scores * to_log2 - shift[:, None])
    shrink = tl.exp2(maximum * to_log2 - shift)
    return weights, shrink, new_maximum, total * shrink + tl.sum(weights, 1)


@triton.jit
def with_sink(sink, maximum, total, acc) -> tuple[tl.tensor, tl.tensor]:
    """Sum and weighted values once the sink logit has joined the softmax; `maximum` is a base-2 exponent."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new_maximum = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - new_maximum)
    return total * shrink + tl.exp2(sink - new_maximum), acc * shrink[:, None]


@triton.jit
def finish(
    out,
    sinks,
    first_head,
    pairs,
    own,
    maximum,
    total,
    acc,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
) -> None:
    """Write the results of (query, head) pairs, HEADS of each query; out points at the first one's."""
    if sinks is not None:
        sink = tl.load(sinks + first_head + pairs % HEADS, mask=own, other=0.0)
        total, acc = with_sink(sink, maximum, total, acc)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    dv = tl.arange(0, BLOCK_DV)
    target = out + (pairs // HEADS * NUM_HEADS + pairs % HEADS)[:, None] * HEAD_SIZE_V + dv[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=own[:, None] & (dv < HEAD_SIZE_V)[None, :])


@triton.jit
def _join_parts(
    out,
    sinks,
    first_head,
    scratch,
    num_parts,
    part_stride,
    num_stored,
    num_heads,
    num_pairs,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Join the parts of a row. Part i is at scratch + i * part_stride: values, maxima and sums of num_stored pairs."""
    dv = tl.arange(0, BLOCK_DV)
    for p0 in range(0, num_pairs, BLOCK_P):
        pairs = p0 + tl.arange(0, BLOCK_P)
        own = (pairs < num_pairs) & (pairs % HEADS < num_heads)
        maximum = tl.full([BLOCK_P], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_P], tl.float32)
        acc = tl.zeros([BLOCK_P, BLOCK_DV], tl.float32)
        for s0 in range(0, num_parts, BLOCK_S):
            s = s0 + tl.arange(0, BLOCK_S)
            inside = (s < num_parts)[:, None] & own[None, :]
            parts = scratch + s[:, None] * part_stride
            # Other multiprocessors wrote them: not from this one's own cache.
            loads = inside[:, :, None] & (dv < HEAD_SIZE_V)[None, None, :]
            offsets = pairs[None, :, None] * HEAD_SIZE_V + dv[None, None, :]
            values = tl.load(parts[:, :, None] + offsets, mask=loads, other=0.0, cache_modifier=".cg")
            parts += num_stored * HEAD_SIZE_V + pairs[None, :]
            maxima = tl.load(parts, mask=inside, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(parts + num_stored, mask=inside, other=0.0, cache_modifier=".cg")
            new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
            finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(maxima - finite[None, :])
            shrink = tl.exp2(maximum - finite)
            total = total * shrink + tl.sum(sums * weights, 0)
            acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
            maximum = new_maximum
        finish(
            *(out, sinks, first_head, pairs, own, maximum, total, acc),
            *(HEADS, NUM_HEADS, HEAD_SIZE_V, BLOCK_DV),
        )


@triton.jit
def leave_part(
    out,
    sinks,
    first_head,
    scratch,
    arrived,
    item,
    part,
    num_parts,
    num_stored,
    stored_size,
    pairs,
    own,
    num_heads,
    num_pairs,
    maximum,
    total,
    acc,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Finish a row of one part; else write the part to the scratch, and join all of them if it is the last to come."""
    if num_parts == 1:
        finish(
            *(out, sinks, first_head, pairs, own, maximum, total, acc),
            *(HEADS, NUM_HEADS, HEAD_SIZE_V, BLOCK_DV),
        )
        return
    part_stride = tl.num_programs(0).to(tl.int64) * stored_size
    here = scratch + item * part_stride + tl.program_id(0) * stored_size
    dv = tl.arange(0, BLOCK_DV)
    stored = own[:, None] & (dv < HEAD_SIZE_V)[None, :]
    tl.store(here + pairs[:, None] * HEAD_SIZE_V + dv[None, :], acc, mask=stored)
    tl.store(here + num_stored * HEAD_SIZE_V + pairs, maximum, mask=own)
    tl.store(here + num_stored * (HEAD_SIZE_V + 1) + pairs, total, mask=own)
    tl.debug_barrier()  # all of it is written before it is counted
    if tl.atomic_add(arrived, 1, sem="acq_rel") == num_parts - 1:
        tl.store(arrived, 0)  # as the next launch wants it
        _join_parts(
            *(out, sinks, first_head, here - part * part_stride, num_parts, part_stride, num_stored),
            *(num_heads, num_pairs, HEADS, NUM_HEADS, HEAD_SIZE_V, BLOCK_DV, BLOCK_P, BLOCK_S),
        )


def searched_rows(num_reqs: int) -> int:
    """Rows that a search reads at a time."""
    return 1 if num_reqs == 1 else 32 if num_reqs <= 32 else 256


def key_block(spec: AttentionSpec) -> int:
    """Entries of a key that are not the value as well, rounded up to what a matrix product takes."""
    size = spec.head_size - (spec.head_size_v if spec.value_from_key else 0)
    return max(16, next_power_of_2(size))
