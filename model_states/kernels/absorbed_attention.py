"""Cross-attention over the encoder's output itself, which is key and value of every layer and head.

Token t looks at entry e = entries[s] with n = lengths[s] positions, s = slots[t]. Keys and values of a head are
products of what is kept, x = kept[e, p], with the head's weights K and V [head_size, hidden_size]; these are applied to
what is on the other side of the sums instead, once a token and not once a position:

    u         = scale * q K                                      q = query[t, h]
    s[p]      = u . x[p]                                         for p in [0, n)
    y         = sum_p exp(s[p]) x[p] / sum_p exp(s[p])           0 where n = 0
    out[t, h] = V y + b

(arXiv 2405.04434, section 2.1.2, where this is called absorption.) A bias of keys adds the same to all s of a head, so
it is left out. This reads half of what keys and values take, which is what bounds a step of many rows, keeps one tensor
for all layers, and computes hidden_size / head_size times as much, which the tensor cores have room for.

The middle two formulas are one kernel. A program takes a token and a part of the positions, all heads together, and
keeps their sums over all of hidden_size in registers: each of its eight warps has a slice of hidden_size of its own,
for which it computes partial scores and later the weighted sums, so that each position is read once from memory and
twice from shared memory. Partial scores are added up through shared memory, laid out so that a thread finds the eight
of a score under its own address. That is said in Gluon, where layouts are the author's: what Triton makes of the same
spills registers, and adds partial scores by shuffles. The parts are joined by the kernel that multiplies with V.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.join_parts import MAX_PARTS, join_parts_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
except ImportError:  # without Triton the kernel is never launched
    from model_states.kernels.triton_import import tl as gl
    from model_states.kernels.triton_import import triton as gluon

    async_copy = mma_v2 = None

# Triton 3.9 has another name for it.
_names = ("async_load", "async_copy_global_to_shared")
_async_load: Any = next((getattr(async_copy, name) for name in _names if hasattr(async_copy, name)), None)

_WARPS = 8
_TILE = 32  # positions that are worked on at once
_RING_BYTES = 160 << 10  # of positions in shared memory
_START = 100  # positions that could be read in the time that a program takes to start and to end
TOKENS = 256  # of a launch; more would only take memory


def slices(hidden_size: int) -> tuple[int, int] | None:
    """A warp's share of hidden_size as two powers of two that a matrix product takes; None where there are none."""
    share, rest = divmod(hidden_size, _WARPS)
    if rest or share < 32:
        return None
    first = 1 << (share - 1).bit_length() - 1
    second = share - first
    return (first, second) if second >= 16 and second & (second - 1) == 0 else None


def absorbs(dtype: torch.dtype, device: torch.device, num_heads: int, hidden_size: int) -> bool:
    """Whether the kernel serves this shape on this device: 16 bits, Hopper or later, at most 24 heads."""
    return (
        device.type == "cuda"
        and use_triton(torch.empty(0, device=device))
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and num_heads <= 24
        and hidden_size <= 1280
        and slices(hidden_size) is not None
    )


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def num_parts(num_tokens: int, max_len: int, num_processors: int) -> int:
    """Parts that the positions of a token are cut into; each takes a multiprocessor, and all of them some turns."""

    def cost(parts: int) -> float:
        return -(-num_tokens * parts // num_processors) * (max_len / parts + _START)

    return min(range(1, min(MAX_PARTS, -(-max_len // _TILE)) + 1), key=cost)


def absorbed_attention_torch(
    out: torch.Tensor,
    query: torch.Tensor,
    kept: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    value_bias: torch.Tensor | None,
    slots: torch.Tensor,
    entries: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> None:
    """The formulas above, one token at a time."""
    absorbed = torch.einsum("thd,hdk->thk", query.float(), key_weight.float()) * scale
    mean = torch.zeros_like(absorbed)
    for token, slot in enumerate(slots.tolist()):
        x = kept[int(entries[slot]), : int(lengths[slot])].float()
        mean[token] = (absorbed[token] @ x.T).softmax(-1) @ x
    result = torch.einsum("thk,hdk->thd", mean, value_weight.float())
    out.copy_(result if value_bias is None else result + value_bias)


@gluon.jit
def _places(
    count,
    stride,
    ROWS: gl.constexpr,
    FIRST_DIM: gl.constexpr,
    SLICE: gl.constexpr,
    WARPS: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:
    """Where the warps' slices [WARPS, ROWS, SLICE] of rows lie; what is behind `count` rows is the last one again."""
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    t = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    d = gl.arange(0, SLICE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
    if count is not None:
        t = gl.minimum(t, count - 1)
    return t * stride + FIRST_DIM + w * SLICE + d


@gluon.jit
def _ask(
    ring_a,
    ring_b,
    slot,
    x,
    position,
    end,
    to_a,
    to_b,
    SIZE: gl.constexpr,
    A: gl.constexpr,
    B: gl.constexpr,
    WARPS: gl.constexpr,
    TILE: gl.constexpr,
    COPY_A: gl.constexpr,
    COPY_B: gl.constexpr,
) -> None:
    """Have a tile of positions come to a slot of the rings, one group of copies; a full one has its places at hand."""
    count = end - position
    x += position * SIZE
    if count >= TILE:
        _async_load(ring_a.index(slot), x + to_a)
        _async_load(ring_b.index(slot), x + to_b)
    elif count > 0:
        _async_load(ring_a.index(slot), x + _places(count, SIZE, TILE, 0, A, WARPS, COPY_A))
        _async_load(ring_b.index(slot), x + _places(count, SIZE, TILE, WARPS * A, B, WARPS, COPY_B))
    async_copy.commit_group()


@gluon.jit
def _zeros(WARPS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr) -> gl.tensor:
    return gl.zeros([WARPS, ROWS, HEADS], gl.float32, LAYOUT)


@gluon.jit
def _read_weights(
    weights,
    shrinks,
    FIRST: gl.constexpr,
    HEADS: gl.constexpr,
    TILE: gl.constexpr,
    WARPS: gl.constexpr,
    MMA: gl.constexpr,
    RIGHT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Weights [WARPS, TILE, HEADS] of some heads, the same for all warps, and what older sums [.., .., HEADS] lose."""
    weight = gl.expand_dims(weights.slice(FIRST, HEADS, 1).load(gl.SliceLayout(0, RIGHT)), 0)
    weight, _ = gl.broadcast(weight, gl.zeros([WARPS, TILE, HEADS], weight.dtype, RIGHT))
    shrink = shrinks.slice(FIRST, HEADS, 0).load(gl.SliceLayout(0, gl.SliceLayout(0, MMA)))
    return weight, shrink[None, :][None, :, :]


@gluon.jit
def _store_sums(
    out,
    y_a,
    y_b,
    FIRST_DIM: gl.constexpr,
    HEADS_A: gl.constexpr,
    HEADS_B: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    SLICE: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    d = gl.arange(0, SLICE, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    to = out + FIRST_DIM + w * SLICE + d
    a = gl.arange(0, HEADS_A, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
    gl.store(to + a * SIZE, y_a.to(out.dtype.element_ty), mask=(a < NUM_HEADS) & (w + d >= 0))
    b = HEADS_A + gl.arange(0, HEADS_B, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
    gl.store(to + b * SIZE, y_b.to(out.dtype.element_ty), mask=(b < NUM_HEADS) & (w + d >= 0))


@gluon.jit
def _absorbed_attention_kernel(
    sums,
    totals,
    absorbed,
    kept,
    slots,
    entries,
    lengths,
    max_len,
    head_stride,
    scale,
    NUM_HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    A: gl.constexpr,
    B: gl.constexpr,
    TILE: gl.constexpr,
    HEADS_A: gl.constexpr,
    HEADS_B: gl.constexpr,
    RING: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    HEADS: gl.constexpr = 2 * HEADS_A
    dtype: gl.constexpr = kept.dtype.element_ty
    # Of products: tokens or channels by heads, a slice of hidden_size for each warp.
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # Of copies: a warp brings what it will use.
    COPY_A: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // A, A // 8], [WARPS, 1, 1], [2, 1, 0])
    COPY_B: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // B, B // 8], [WARPS, 1, 1], [2, 1, 0])
    # Shared memory, swizzled so that neither side of it meets a bank twice.
    RING_A: gl.constexpr = gl.SwizzledSharedLayout(8, 1 if A >= 64 else 64 // A, min(A // 8, 8), [2, 1, 0])
    RING_B: gl.constexpr = gl.SwizzledSharedLayout(8, 1 if B >= 64 else 64 // B, min(B // 8, 8), [2, 1, 0])
    PARTIAL: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // HEADS, HEADS // 4, [2, 1, 0])
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // HEADS, HEADS // 8, [1, 0])
    # Of scores: a thread has a position and a few heads, and of these the partial scores of all warps.
    SCORES: gl.constexpr = gl.BlockedLayout([WARPS, 1, HEADS // WARPS], [1, 32, 1], [1, 1, WARPS], [2, 1, 0])
    POSITION_HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    HEAD: gl.constexpr = gl.SliceLayout(0, POSITION_HEAD)
    token, part, parts = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    # What is read of the tables and of what is kept was written before this forward began.
    slot = gl.load(slots + token)
    length = gl.load(lengths + slot)
    entry = gl.load(entries + slot).to(gl.int64)
    part_len = gl.cdiv(gl.cdiv(length, parts), TILE) * TILE
    first = part * part_len
    left = gl.minimum(part_len, length - first)
    x = kept + (entry * max_len + first) * SIZE
    ring_a = gl.allocate_shared_memory(dtype, [RING, WARPS, TILE, A], RING_A)
    ring_b = gl.allocate_shared_memory(dtype, [RING, WARPS, TILE, B], RING_B)
    partial = gl.allocate_shared_memory(gl.float32, [WARPS, TILE, HEADS], PARTIAL)
    weights = gl.allocate_shared_memory(dtype, [TILE, HEADS], WEIGHTS)
    shrinks = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    later_a = gl.allocate_shared_memory(dtype, [WARPS, HEADS_B, A], RING_A)
    later_b = gl.allocate_shared_memory(dtype, [WARPS, HEADS_B, B], RING_B)
    to_a = _places(None, SIZE, TILE, 0, A, WARPS, COPY_A)
    to_b = _places(None, SIZE, TILE, WARPS * A, B, WARPS, COPY_B)
    for i in gl.static_range(RING - 1):
        _ask(ring_a, ring_b, i, x, i * TILE, left, to_a, to_b, SIZE, A, B, WARPS, TILE, COPY_A, COPY_B)
    if PDL:
        gdc_wait()
    # The heads' queries come by the slot that is empty yet, as if they were positions.
    absorbed += token * SIZE
    last_a, last_b = ring_a.index(RING - 1), ring_b.index(RING - 1)
    _async_load(last_a, absorbed + _places(NUM_HEADS, head_stride, TILE, 0, A, WARPS, COPY_A))
    _async_load(last_b, absorbed + _places(NUM_HEADS, head_stride, TILE, WARPS * A, B, WARPS, COPY_B))
    async_copy.commit_group()
    async_copy.wait_group(0)
    q_aa = last_a.slice(0, HEADS_A, 1).permute((0, 2, 1)).load(RIGHT)
    q_ba = last_b.slice(0, HEADS_A, 1).permute((0, 2, 1)).load(RIGHT)
    # Those of the last heads stay in shared memory, for there are not registers for all.
    later_a.permute((0, 2, 1)).store(last_a.slice(HEADS_A, HEADS_B, 1).permute((0, 2, 1)).load(RIGHT))
    later_b.permute((0, 2, 1)).store(last_b.slice(HEADS_A, HEADS_B, 1).permute((0, 2, 1)).load(RIGHT))
    # Of a part that has seen nothing: no infinity, whose difference with itself is NaN.
    maximum = gl.full([HEADS], -1e30, gl.float32, HEAD)
    total = gl.zeros([TILE, HEADS], gl.float32, POSITION_HEAD)
    y_aa, y_ab = _zeros(WARPS, A, HEADS_A, MMA), _zeros(WARPS, A, HEADS_B, MMA)
    y_ba, y_bb = _zeros(WARPS, B, HEADS_A, MMA), _zeros(WARPS, B, HEADS_B, MMA)
    position = gl.arange(0, TILE, gl.SliceLayout(1, POSITION_HEAD))
    scale *= 1.4426950408889634
    at = 0
    for n in range(0, left, TILE):
        async_copy.wait_group(RING - 2)
        before = at - 1 if at > 0 else RING - 1
        ahead = n + (RING - 1) * TILE
        _ask(ring_a, ring_b, before, x, ahead, left, to_a, to_b, SIZE, A, B, WARPS, TILE, COPY_A, COPY_B)
        tile_a, tile_b = ring_a.index(at), ring_b.index(at)
        x_a, x_b = tile_a.load(LEFT), tile_b.load(LEFT)
        s_a = mma_v2(x_a, q_aa, _zeros(WARPS, TILE, HEADS_A, MMA))
        q_ab, q_bb = later_a.permute((0, 2, 1)).load(RIGHT), later_b.permute((0, 2, 1)).load(RIGHT)
        s_b = mma_v2(x_a, q_ab, _zeros(WARPS, TILE, HEADS_B, MMA))
        partial.slice(0, HEADS_A, 2).store(mma_v2(x_b, q_ba, s_a))
        partial.slice(HEADS_A, HEADS_B, 2).store(mma_v2(x_b, q_bb, s_b))
        scores = gl.sum(partial.load(SCORES), 0) * scale
        scores = gl.where((position < left - n)[:, None], scores, -1e30)
        new_maximum = gl.maximum(maximum, gl.max(scores, 0))
        weight = gl.exp2(scores - new_maximum[None, :])
        shrink = gl.exp2(maximum - new_maximum)
        total = total * shrink[None, :] + weight
        maximum = new_maximum
        weights.store(weight.to(dtype))
        shrinks.store(shrink)
        w_a, less_a = _read_weights(weights, shrinks, 0, HEADS_A, TILE, WARPS, MMA, RIGHT)
        w_b, less_b = _read_weights(weights, shrinks, HEADS_A, HEADS_B, TILE, WARPS, MMA, RIGHT)
        x_a, x_b = tile_a.permute((0, 2, 1)).load(LEFT), tile_b.permute((0, 2, 1)).load(LEFT)
        y_aa, y_ab = mma_v2(x_a, w_a, y_aa * less_a), mma_v2(x_a, w_b, y_ab * less_b)
        y_ba, y_bb = mma_v2(x_b, w_a, y_ba * less_a), mma_v2(x_b, w_b, y_bb * less_b)
        at = at + 1 if at < RING - 1 else 0
    async_copy.wait_group(0)
    item = (token * parts + part).to(gl.int64)
    sums += item * NUM_HEADS * SIZE
    _store_sums(sums, y_aa, y_ab, 0, HEADS_A, HEADS_B, NUM_HEADS, SIZE, WARPS, A, MMA)
    _store_sums(sums, y_ba, y_bb, WARPS * A, HEADS_A, HEADS_B, NUM_HEADS, SIZE, WARPS, B, MMA)
    head = gl.arange(0, HEADS, HEAD)
    totals += item * 2 * NUM_HEADS + head
    gl.store(totals, maximum, mask=head < NUM_HEADS)
    gl.store(totals + NUM_HEADS, gl.sum(total, 0), mask=head < NUM_HEADS)


def absorbed_attention_triton(
    out: torch.Tensor,
    query: torch.Tensor,
    kept: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    value_bias: torch.Tensor | None,
    slots: torch.Tensor,
    entries: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> None:
    """A product, the kernel over (tokens, parts), and the one that joins them, for some tokens at a time."""
    num_heads, size = query.shape[1], kept.shape[2]
    sizes = slices(size)
    assert sizes is not None, "ask `absorbs` first"
    processors = _num_processors(query.device)
    for t in range(0, len(query), TOKENS):
        some = slice(t, t + TOKENS)
        n = len(query[some])
        absorbed = torch.bmm(query[some].transpose(0, 1), key_weight)
        parts = num_parts(n, kept.shape[1], processors)
        sums = torch.empty((n, parts, num_heads, size), dtype=query.dtype, device=query.device)
        totals = torch.empty((n, parts, 2, num_heads), dtype=torch.float32, device=query.device)
        _absorbed_attention_kernel[(n, parts)](
            *(sums, totals, absorbed, kept, slots[some], entries, lengths),
            *(kept.shape[1], absorbed.stride(0), scale),
            NUM_HEADS=num_heads,
            SIZE=size,
            WARPS=_WARPS,
            A=sizes[0],
            B=sizes[1],
            TILE=_TILE,
            HEADS_A=8 if num_heads <= 16 else 16,
            HEADS_B=8,
            RING=max(2, min(4, _RING_BYTES // (_TILE * size * kept.element_size()))),
            num_warps=_WARPS,
            **programmatic_launch(query),
        )
        join_parts_triton(out[some], sums, totals, value_weight, value_bias)


def absorbed_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    kept: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    value_bias: torch.Tensor | None,
    slots: torch.Tensor,
    entries: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> None:
    """Write `out` [num_tokens, num_heads, head_size], contiguous; query is of the same shape.

    kept [num_entries, max_len, hidden_size]; key_weight and value_weight [num_heads, head_size, hidden_size];
    value_bias [num_heads, head_size]; slots int32 [num_tokens]; entries and lengths int32 [num_slots]. All are
    contiguous but query.
    """
    op = absorbed_attention_triton if use_triton(query) else absorbed_attention_torch
    op(out, query, kept, key_weight, value_weight, value_bias, slots, entries, lengths, scale)
