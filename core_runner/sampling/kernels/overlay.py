"""Logits of which requests change few: the model's own, with other values in the place of some, and some forbidden.

    x[row, id] = -inf             where the slot's mask forbids the id; a NaN stays, for its row must fail
                 values[row, id]  where the id has an entry, or where the slot has penalties and the id was seen
                 logits[row, id]  elsewhere

So nothing of a vocabulary's size is written: `penalized_values` and `logit_entries` fill in `values` what is read of
it, and a bit for each id says where that is. Every kernel that reads logits reads them through `overlaid`. The values
are float32 whatever the logits are: a biased or penalized logit rounded to bfloat16 would tie with others, and the
stream must not depend on whether somebody else in the batch needs the logits as they were. `working_logits` writes all
of it for what changes logits in other ways.

logits [n, >= vocab_size] (any float type, strided rows), values float32 [n, vocab_size], or without columns where masks
alone lie over the logits; the rest in `OptionRows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.noise import GROUP
from core_runner.sampling.option_rows import BITS_ROW, MASK_ROW, SEEN_ROW, OptionRows
from model_states.kernels.triton_import import tl, triton

_GROUP, _WORDS = tl.constexpr(GROUP), tl.constexpr(GROUP // 32)
_MASK_ROW, _SEEN_ROW, _BITS_ROW = tl.constexpr(MASK_ROW), tl.constexpr(SEEN_ROW), tl.constexpr(BITS_ROW)


class Overlay(NamedTuple):
    """What lies over a step's logits."""

    values: torch.Tensor
    rows: OptionRows


def kernel_argument(overlay: Overlay | None) -> tuple[Any, ...]:
    """What `overlaid` takes apart again; Triton compiles a kernel for the tables that are there."""
    if overlay is None:
        return (None,) * 14
    values, rows = overlay
    tables = (rows.options, rows.masks, rows.seen_bits, rows.entry_bits)
    strides = tuple(0 if table is None else table.stride(0) for table in tables)
    where = (rows.slots, rows.logits_indices, rows.num_drafts, rows.input_ids)
    return (values, values.stride(0), *where, *tables, *strides)


def held_torch(rows: OptionRows, vocab_size: int) -> torch.Tensor:
    """Ids that each row's slot holds, if it has penalties, the drafts before the row included; bool [n, vocab_size]."""
    assert rows.seen_bits is not None
    seen_row = rows.column(SEEN_ROW)[:, None]
    ids = torch.arange(vocab_size, device=seen_row.device)
    held = _bits_torch(rows.seen_bits, seen_row, ids)
    for back in range(int(rows.num_drafts.max()) if len(held) else 0):
        token = rows.input_ids[(rows.logits_indices - back).clamp(min=0)]
        held |= (ids == token[:, None]) & (back < rows.num_drafts)[:, None] & (seen_row >= 0)
    return held


def overlaid_torch(logits: torch.Tensor, vocab_size: int, overlay: Overlay | None) -> torch.Tensor:
    """All of it, [n, vocab_size]: float32 if there is an overlay, else a view of the logits."""
    x = logits[:, :vocab_size]
    if overlay is None:
        return x
    values, rows = overlay
    x, ids = x.float(), torch.arange(vocab_size, device=x.device)
    if rows.seen_bits is not None:
        x = torch.where(held_torch(rows, vocab_size), values, x)
    if rows.entry_bits is not None:
        x = torch.where(_bits_torch(rows.entry_bits, rows.column(BITS_ROW)[:, None], ids), values, x)
    if rows.masks is not None:
        mask_row = rows.column(MASK_ROW)[:, None]
        x = torch.where(_bits_torch(rows.masks, mask_row, ids) | (mask_row < 0) | x.isnan(), x, -torch.inf)
    return x


def _bits_torch(table: torch.Tensor, row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Bits of ids [m] in a table's rows [n, 1], bool [n, m]; none for a row below 0."""
    return ((table[row.clamp(min=0), ids // 32] >> (ids % 32)) & 1 == 1) & (row >= 0)


@triton.jit
def _bits(table, table_row, table_stride, ids, groups, vocab_size, drafts, num_drafts) -> Any:
    """Whether bits of ids are set, those of drafts included, int32 like ids; 0 for a row below 0.

    groups int32 [n]: of which ids [n, GROUP] are all ids, in order; None if they are not, and each reads its word.
    drafts: pointer to the last of `num_drafts` ids, which are read backwards.
    """
    table += table_row.to(tl.int64) * table_stride
    end = tl.where(table_row >= 0, vocab_size, 0)
    at = ids // 32 if groups is None else groups[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    word = tl.load(table + at, mask=at * 32 < end, other=0)
    for back in range(0, tl.where(table_row >= 0, num_drafts, 0)):
        token = tl.load(drafts - back).to(tl.int32)
        token = tl.where(token < vocab_size, token, -1)
        word |= tl.where(at == token >> 5, tl.full((), 1, tl.int32) << (token & 31), 0)
    if groups is None:
        bits = (word >> (ids & 31)) & 1
    else:
        bits = tl.reshape((word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1, ids.shape)
    return bits


@triton.jit
def overlaid(x, ids, groups, row, vocab_size, overlay) -> Any:
    """The values of some ids of a row, of which x float32 are the logits; -inf after the vocabulary, where x must be.

    ids int32 like x; groups: as in `_bits`. overlay: what `kernel_argument` gave.
    """
    (
        values,
        values_stride,
        slots,
        logits_indices,
        num_drafts,
        input_ids,
        options,
        masks,
        seen_bits,
        entry_bits,
        options_stride,
        masks_stride,
        seen_stride,
        entry_stride,
    ) = overlay
    if seen_bits is not None:
        seen_row = tl.load(options + tl.load(slots + row).to(tl.int64) * options_stride + _SEEN_ROW)
        drafts, count = input_ids + tl.load(logits_indices + row), tl.load(num_drafts + row)
        changed = _bits(seen_bits, seen_row, seen_stride, ids, groups, vocab_size, drafts, count)
        x = tl.load(values + row * values_stride + ids, mask=changed != 0, other=x)
    if entry_bits is not None:
        bits_row = tl.load(options + tl.load(slots + row).to(tl.int64) * options_stride + _BITS_ROW)
        changed = _bits(entry_bits, bits_row, entry_stride, ids, groups, vocab_size, values, 0)
        x = tl.load(values + row * values_stride + ids, mask=changed != 0, other=x)
    if masks is not None:
        mask_row = tl.load(options + tl.load(slots + row).to(tl.int64) * options_stride + _MASK_ROW)
        allowed = _bits(masks, mask_row, masks_stride, ids, groups, vocab_size, values, 0)
        is_open = tl.where(mask_row < 0, 1, allowed) != 0
        x = tl.where(is_open | (x != x), x, -float("inf"))
    return x
