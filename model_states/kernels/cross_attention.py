"""Attention over entries of a pool: every query of a row sees all positions of the row's entry.

Token t of batch row b, which is query_start_loc[b] <= t < query_start_loc[b + 1], looks at entry e = entries[s] with
n = lengths[s] positions, s = idx_mapping[b]. For every head h, with h' = h // (num_heads // num_kv_heads),

    s[p]      = scale * query[t, h] . key_pool[e, h', p]                      for p in [0, n)
    out[t, h] = sum_p exp(s[p]) value_pool[e, h', p] / sum_p exp(s[p])        0 where n = 0

Tokens at or past query_start_loc[-1] get zeros. query [num_tokens, num_heads, head_size], out the same and contiguous;
key_pool and value_pool are `Entries` [num_entries, num_kv_heads, max_len, head_size]; idx_mapping int32 [num_rows],
query_start_loc int32 [num_rows + 1], entries and lengths int32 [num_slots].

A step whose rows have one query each is `cross_attention_step`'s. Else a program takes a tile of a row's queries: tile
j of row b is program query_start_loc[b] // tile + b + j. These ranges never overlap, so num_tokens // tile + num_rows
programs are enough, whatever the lengths are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from model_states.kernels.cross_attention_step import cross_attention_step_triton
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton
from model_states.kernels.write_entries import Entries

_TILE = 16  # queries of a program; the least that a tensor core takes
_SEARCHED = 256  # rows that a program looks through at a time


@dataclass(frozen=True, slots=True)
class CrossRows:
    """Which entry each row of a step looks at. max_query_len is a bound that the host knows."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    entries: torch.Tensor
    lengths: torch.Tensor
    max_query_len: int

    def token_slots(self, num_tokens: int) -> torch.Tensor:
        """Slot of each token, int32 [num_tokens]; the last one, which looks at nothing, of padding."""
        if self.max_query_len == 1:
            return self.idx_mapping
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=self.idx_mapping.device)
        rows = torch.searchsorted(self.query_start_loc[1:], tokens, right=True)
        return functional.pad(self.idx_mapping, (0, 1), value=len(self.lengths) - 1)[rows]


def cross_attention_torch(
    out: torch.Tensor,
    query: torch.Tensor,
    key_pool: Entries,
    value_pool: Entries,
    rows: CrossRows,
    scale: float,
) -> None:
    """The formula above, one row at a time."""
    out.zero_()
    starts = rows.query_start_loc.tolist()
    # Heads in groups of those that share keys: [num_tokens, num_kv_heads, group, head_size].
    grouped = query.unflatten(1, (key_pool.values.shape[1], -1)).float() * scale
    for row, slot in enumerate(rows.idx_mapping.tolist()):
        entry, length = int(rows.entries[slot]), int(rows.lengths[slot])
        tokens = slice(starts[row], starts[row + 1])
        if length == 0 or tokens.start == tokens.stop:
            continue
        scores = torch.einsum("qkgd,kpd->kgqp", grouped[tokens], key_pool.read(entry)[:, :length].float())
        value = value_pool.read(entry)[:, :length].float()
        seen = torch.einsum("kgqp,kpd->qkgd", scores.softmax(-1), value)
        out[tokens] = seen.flatten(1, 2).to(out.dtype)


@triton.jit
def _row_of_tile(query_start_loc, num_rows, tile, TILE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The last row whose first tile is not after `tile`."""
    row = tile * 0 - 1
    for r0 in range(0, num_rows, BLOCK):
        rows = r0 + tl.arange(0, BLOCK)
        starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
        reached = (rows < num_rows) & (starts // TILE + rows <= tile)
        row += tl.sum(reached.to(tl.int32), 0)
    return row


@triton.jit
def _widened(x, dtype: tl.constexpr) -> tl.tensor:
    """x in another dtype. Of int8 in fp16, 128 + x are the low bits of 1024: sooner there than by a conversion."""
    if x.dtype == tl.int8 and dtype == tl.float16:
        return ((x.to(tl.int16) + 128) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return x.to(dtype)


@triton.jit
def _attend(
    q,
    keys,
    values,
    length,
    scale,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Sum of weights [TILE] and weighted values [TILE, BLOCK_D]."""
    maximum = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    d = tl.arange(0, BLOCK_D)
    for n0 in range(0, length, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        # What lies behind an entry's length may be NaN, which a weight of 0 would not silence: it is not read.
        inside = n < length
        k = tl.load(
            keys + n[None, :] * HEAD_SIZE + d[:, None],
            mask=inside[None, :] & (d < HEAD_SIZE)[:, None],
            other=0.0,
        )
        v = tl.load(
            values + n[:, None] * HEAD_SIZE + d[None, :],
            mask=inside[:, None] & (d < HEAD_SIZE)[None, :],
            other=0.0,
        )
        k, v = _widened(k, q.dtype), _widened(v, q.dtype)
        scores = tl.dot(q, k, input_precision=PRECISION) * (scale * 1.4426950408889634)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        maximum = new_maximum
    return total, acc


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _cross_attention_kernel(
    out,
    query,
    key_pool,
    key_scales,
    value_pool,
    value_scales,
    idx_mapping,
    query_start_loc,
    entries,
    lengths,
    num_rows,
    num_tokens,
    max_len,
    token_stride,
    head_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    IS_INT8: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEARCHED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, head = tl.program_id(0), tl.program_id(1)
    m, d = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    # Tiles that reach past the last token write what is padding of them.
    last_token = tl.load(query_start_loc + num_rows)
    tokens = tile * TILE + m
    padding = (tokens >= last_token) & (tokens < num_tokens)
    target = out + (tokens.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
    zeros = tl.zeros([TILE, BLOCK_D], out.dtype.element_ty)
    tl.store(target, zeros, mask=padding[:, None] & (d < HEAD_SIZE)[None, :])
    row = _row_of_tile(query_start_loc, num_rows, tile, TILE, SEARCHED)
    first_query = (tile - tl.load(query_start_loc + row) // TILE - row) * TILE
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start
    if first_query >= query_len:
        return
    slot = tl.load(idx_mapping + row)
    length = tl.load(lengths + slot)
    tokens = (start + first_query + m).to(tl.int64)
    is_query = (first_query + m < query_len)[:, None] & (d < HEAD_SIZE)[None, :]
    q = tl.load(
        query + tokens[:, None] * token_stride + head * head_stride + d[None, :], mask=is_query, other=0.0
    )
    entry = tl.load(entries + slot).to(tl.int64) * (NUM_HEADS // GROUP) + head // GROUP
    base = entry * max_len * HEAD_SIZE
    if IS_INT8:
        # Integers of 8 bits are exact in 16; the query is brought to where these are precise.
        has_scale = d < tl.where(length > 0, HEAD_SIZE, 0)
        q = q.to(tl.float32) * tl.load(key_scales + entry * HEAD_SIZE + d, mask=has_scale, other=0.0)[None, :]
        unit = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)[:, None]
        q = (q / unit).to(tl.float32 if PRECISION == "ieee" else tl.float16)
        scale *= unit
    total, acc = _attend(
        q,
        key_pool + base,
        value_pool + base,
        length,
        scale,
        HEAD_SIZE,
        TILE,
        BLOCK_N,
        BLOCK_D,
        PRECISION,
    )
    if IS_INT8:
        acc *= tl.load(value_scales + entry * HEAD_SIZE + d, mask=has_scale, other=0.0)[None, :]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (tokens * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_query)


def cross_attention_triton(
    out: torch.Tensor,
    query: torch.Tensor,
    key_pool: Entries,
    value_pool: Entries,
    rows: CrossRows,
    scale: float,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """Launch over (tiles, heads), or as the step's kernel does."""
    if rows.max_query_len == 1:
        pools, tables = (key_pool, value_pool), (rows.idx_mapping, rows.entries, rows.lengths)
        cross_attention_step_triton(out, query, *pools, *tables, scale, scratch, arrived)
        return
    num_tokens, num_heads, head_size = query.shape
    num_rows = len(rows.idx_mapping)
    is_wide = query.element_size() == 4
    _cross_attention_kernel[(num_tokens // _TILE + num_rows, num_heads)](
        *(out, query, key_pool.values, key_pool.scales, value_pool.values, value_pool.scales),
        *(rows.idx_mapping, rows.query_start_loc, rows.entries, rows.lengths),
        *(num_rows, num_tokens, key_pool.values.shape[2], query.stride(0), query.stride(1), scale),
        NUM_HEADS=num_heads,
        GROUP=num_heads // key_pool.values.shape[1],
        HEAD_SIZE=head_size,
        IS_INT8=key_pool.scales is not None,
        TILE=_TILE,
        BLOCK_N=32 if is_wide else 64,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        SEARCHED=_SEARCHED,
        PRECISION="ieee" if is_wide else "tf32",
        num_warps=4,
        num_stages=3,
        **programmatic_launch(query),
    )


def cross_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_pool: Entries,
    value_pool: Entries,
    rows: CrossRows,
    scale: float,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """Write `out`. scratch, arrived: of at least `scratch_sizes`, for a step of one query a row."""
    if use_triton(query):
        cross_attention_triton(out, query, key_pool, value_pool, rows, scale, scratch, arrived)
    else:
        cross_attention_torch(out, query, key_pool, value_pool, rows, scale)
