"""`cross_attention` of a step whose rows have one query each, of entries in any dtype.

A program takes a row, a head and a part of the positions, and the last one that is done joins the parts: with m_i, l_i,
a_i the maximum, sum and weighted values of part i and m the largest m_i,

    out = sum_i exp(m_i - m) a_i / sum_i exp(m_i - m) l_i

Within a program each position is read by as many threads as take 16 bytes of it, and those that share no position share
nothing until the end: each such stream has a softmax of its own. So nothing but memory is waited for.

Keys of 8 bits are multiplied as such: the query, times their scales, is made integers of 15 bits, whose upper and lower
halves are multiplied with four numbers at a time. That loses less than 16-bit queries have lost. They are integers
because floats of 8 bits, of three bits of mantissa, made four times the error (e4m3, normally distributed values).

What is read of the tables and the pool was written before this forward began, so it is asked for before the kernel
waits for the query.
"""

from __future__ import annotations

import torch

from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton
from model_states.kernels.write_entries import Entries

_PROGRAMS = 960  # that read at the rate of the memory
_WARPS = 4
_POSITIONS = 4  # of a stream at a time
MAX_PARTS = 16


def num_parts(num_rows: int, num_heads: int) -> int:
    """Parts that the positions of a row are cut into: more where there are few rows and heads."""
    return max(1, min(MAX_PARTS, _PROGRAMS // (num_rows * num_heads)))


def scratch_sizes(num_rows: int, num_heads: int, head_size: int) -> tuple[int, int]:
    """What a step of so many rows needs: fp32 numbers for its parts, and int32 counters that are 0."""
    parts = num_parts(num_rows, num_heads)
    items = num_rows * num_heads if parts > 1 else 0
    return parts * items * (head_size + 2), items


@triton.jit
def _add_products(four_a, four_b, total, PACKED: tl.constexpr) -> tl.tensor:
    """total + sum of a_i b_i, of the four int8 in each int32."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [four_a, four_b, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    for i in tl.static_range(4):
        total += ((four_a << (24 - 8 * i)) >> 24) * ((four_b << (24 - 8 * i)) >> 24)
    return total


@triton.jit
def _widen(fours, PACKED: tl.constexpr) -> tl.tensor:
    """fp32 [.., 4 n] of the four int8 in each int32 [.., n]."""
    if PACKED:
        # 128 + the number as the low bits of 2**23: a fourth of the time that conversion instructions take.
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 u;
            xor.b32 u, $4, 0x80808080;
            prmt.b32 $0, u, 0x4B000000, 0x7440;
            prmt.b32 $1, u, 0x4B000000, 0x7441;
            prmt.b32 $2, u, 0x4B000000, 0x7442;
            prmt.b32 $3, u, 0x4B000000, 0x7443;
            sub.f32 $0, $0, 0f4B000080;
            sub.f32 $1, $1, 0f4B000080;
            sub.f32 $2, $2, 0f4B000080;
            sub.f32 $3, $3, 0f4B000080;
            }""",
            "=r,=r,=r,=r,r",
            [fours],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b = ((fours << 24) >> 24).to(tl.float32), ((fours << 16) >> 24).to(tl.float32)
        c, d = ((fours << 8) >> 24).to(tl.float32), (fours >> 24).to(tl.float32)
    shape: tl.constexpr = [fours.shape[0], fours.shape[1], 4 * fours.shape[2]]
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), shape)


@triton.jit
def _halves(
    query, scales, length, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Integers a and b in [-127, 127], four in an int32 [WIDTH], and s: query * scales is about s (128 a + b)."""
    i = tl.arange(0, 4)
    d = tl.arange(0, WIDTH)[:, None] * 4 + i[None, :]
    scale = tl.load(scales + d, mask=d < tl.where(length > 0, HEAD_SIZE, 0), other=0.0)
    q = tl.load(query + d, mask=d < HEAD_SIZE, other=0.0).to(tl.float32) * scale
    unit = tl.maximum(tl.max(tl.abs(q)), 1e-30) / (127 * 128)
    whole = tl.floor(q / unit + 0.5).to(tl.int32)
    upper = (whole + 64) >> 7
    lower = whole - upper * 128
    shifts = (8 * i)[None, :]
    return tl.sum((upper & 255) << shifts, 1), tl.sum((lower & 255) << shifts, 1), unit


@triton.jit
def _join(out, cells, parts, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr) -> None:
    """Write the result of a row and a head out of its parts, of HEAD_SIZE + 2 numbers each."""
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    at = cells + p * (HEAD_SIZE + 2)
    # Other multiprocessors wrote them: not from this one's own cache.
    maxima = tl.load(at, mask=p < parts, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(at + 1, mask=p < parts, other=0.0, cache_modifier=".cg")
    shares = tl.exp2(maxima - tl.max(maxima, 0))
    loads = (p < parts)[:, None] & (d < HEAD_SIZE)[None, :]
    values = tl.load(at[:, None] + 2 + d[None, :], mask=loads, other=0.0, cache_modifier=".cg")
    total = tl.sum(totals * shares, 0)
    result = tl.sum(values * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + d, result.to(out.dtype.element_ty), mask=d < HEAD_SIZE)


@triton.jit(do_not_specialize=["parts"])
def _cross_attention_step_kernel(
    out,
    scratch,
    arrived,
    query,
    keys,
    key_scales,
    values,
    value_scales,
    idx_mapping,
    entries,
    lengths,
    parts,
    max_len,
    token_stride,
    head_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    IS_INT8: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    STREAMS: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # What a position is read as: int32 of four values each, or the values.
    SIZE: tl.constexpr = HEAD_SIZE // 4 if IS_INT8 else HEAD_SIZE
    WIDTH: tl.constexpr = BLOCK_D // 4 if IS_INT8 else BLOCK_D
    BLOCK: tl.constexpr = STREAMS * POSITIONS
    w, d = tl.arange(0, WIDTH), tl.arange(0, BLOCK_D)
    slot = tl.load(idx_mapping + row)
    length = tl.load(lengths + slot)
    entry = tl.load(entries + slot).to(tl.int64) * (NUM_HEADS // GROUP) + head // GROUP
    part_len = tl.cdiv(tl.cdiv(length, parts), BLOCK) * BLOCK
    first = part * part_len
    left = tl.minimum(part_len, length - first)
    p = tl.arange(0, POSITIONS)[None, :] * STREAMS + tl.arange(0, STREAMS)[:, None]
    at = (entry * max_len + first + p)[:, :, None] * SIZE + w[None, None, :]
    is_value = (w < SIZE)[None, None, :]
    keys += at
    values += at
    # What lies behind an entry's length may be NaN, which a weight of 0 would not silence: it is not read.
    k = tl.load(keys, mask=(p < left)[:, :, None] & is_value, other=0)
    v = tl.load(values, mask=(p < left)[:, :, None] & is_value, other=0)
    if PDL:
        gdc_wait()
    scale *= 1.4426950408889634
    query += row.to(tl.int64) * token_stride + head * head_stride
    if IS_INT8:
        upper, lower, unit = _halves(query, key_scales + entry * HEAD_SIZE, length, HEAD_SIZE, WIDTH)
        scale *= unit
        none = tl.zeros_like(k)
    else:
        q = tl.load(query + d, mask=d < HEAD_SIZE, other=0.0).to(tl.float32)
    # Of a stream that has seen nothing: no infinity, whose difference with itself is NaN.
    maximum = tl.full([STREAMS], -1e30, tl.float32)
    total = tl.zeros([STREAMS], tl.float32)
    acc = tl.zeros([STREAMS, BLOCK_D], tl.float32)
    for n0 in range(0, left, BLOCK):
        inside, later = p < left - n0, (p < left - n0 - BLOCK)[:, :, None] & is_value
        keys += BLOCK * SIZE
        values += BLOCK * SIZE
        next_k = tl.load(keys, mask=later, other=0)
        next_v = tl.load(values, mask=later, other=0)
        if IS_INT8:
            products = _add_products(k, upper[None, None, :] + none, none, PACKED) * 128
            products = _add_products(k, lower[None, None, :] + none, products, PACKED)
            scores = tl.sum(products, 2).to(tl.float32)
            wide = _widen(v, PACKED)
        else:
            scores = tl.sum(k.to(tl.float32) * q[None, None, :], 2)
            wide = v.to(tl.float32)
        scores = tl.where(inside, scores * scale, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.sum(wide * weights[:, :, None], 1)
        maximum = new_maximum
        k, v = next_k, next_v
    most = tl.max(maximum, 0)
    shares = tl.where(maximum > -1e30, tl.exp2(maximum - most), 0.0)
    total = tl.sum(total * shares, 0)
    result = tl.sum(acc * shares[:, None], 0)
    if IS_INT8:
        is_read = d < tl.where(length > 0, HEAD_SIZE, 0)
        result *= tl.load(value_scales + entry * HEAD_SIZE + d, mask=is_read, other=0.0)
    item = row * NUM_HEADS + head
    if SPLIT:
        cells = scratch + item.to(tl.int64) * parts * (HEAD_SIZE + 2)
        cell = cells + part * (HEAD_SIZE + 2)
        tl.store(cell, most)
        tl.store(cell + 1, total)
        tl.store(cell + 2 + d, result, mask=d < HEAD_SIZE)
        tl.debug_barrier()  # all of it is written before it is counted
        if tl.atomic_add(arrived + item, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + item, 0)  # as the next launch wants it
            _join(out + item * HEAD_SIZE, cells, parts, HEAD_SIZE, BLOCK_D, BLOCK_P)
    else:
        result /= tl.where(total == 0.0, 1.0, total)
        target = out + item.to(tl.int64) * HEAD_SIZE + d
        tl.store(target, result.to(out.dtype.element_ty), mask=d < HEAD_SIZE)


def cross_attention_step_triton(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: Entries,
    values: Entries,
    idx_mapping: torch.Tensor,
    entries: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """Launch over (rows, heads, parts)."""
    num_rows, num_heads, head_size = query.shape
    assert num_rows == len(idx_mapping), "a step of one query a row is padded to as many rows"
    is_int8 = keys.scales is not None
    is_compiled = torch.version.hip is None and not triton.knobs.runtime.interpret
    kept = [x.values.view(torch.int32) if is_int8 else x.values for x in (keys, values)]
    parts = num_parts(num_rows, num_heads)
    block_d = max(16, triton.next_power_of_2(head_size))
    threads = max(1, block_d * keys.values.element_size() // 16)  # that read a position
    _cross_attention_step_kernel[(num_rows, num_heads, parts)](
        *(out, scratch, arrived, query, kept[0], keys.scales, kept[1], values.scales),
        *(idx_mapping, entries, lengths),
        *(parts, keys.values.shape[2], query.stride(0), query.stride(1), scale),
        NUM_HEADS=num_heads,
        GROUP=num_heads // keys.values.shape[1],
        HEAD_SIZE=head_size,
        IS_INT8=is_int8,
        PACKED=is_compiled,
        SPLIT=parts > 1,
        STREAMS=32 * _WARPS // threads,
        POSITIONS=_POSITIONS,
        BLOCK_D=block_d,
        BLOCK_P=MAX_PARTS,
        num_warps=_WARPS,
        num_stages=1,
        **programmatic_launch(query),
    )
