"""Logit bias, forbidden ids and minimum length: the ids for which a request asks something of their own.

For every entry (id, bias) of the slot of a row:

    x            = penalized(logits[row, id] + bias)               see `penalties`
    out[row, id] = -inf  if bias is -inf, or if the id ends the request and
                   positions[token] + 1 - prompt_len < min_tokens;  else x

It starts from the logits, not from `out`, because a bias comes before the penalties; so entries are of allowed ids
only, and other masks come later. A NaN stays. Ids of one slot's entries differ: no two programs write one place.

logits [n, >= vocab_size] (any float type, strided rows), out float32 [n, vocab_size]; the rest in `OptionRows`.
"""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.penalties import penalize, penalize_torch
from core_runner.sampling.option_rows import ENTRY_ROW, IS_END, MIN_TOKENS, NUM_ENTRIES, OptionRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 128
_ENTRY_ROW, _NUM_ENTRIES = tl.constexpr(ENTRY_ROW), tl.constexpr(NUM_ENTRIES)
_MIN_TOKENS, _IS_END = tl.constexpr(MIN_TOKENS), tl.constexpr(IS_END)


def logit_entries_torch(logits: torch.Tensor, rows: OptionRows, out: torch.Tensor) -> None:
    """Plain torch twin."""
    assert rows.entries is not None
    entry_row, num_entries = rows.column(ENTRY_ROW), rows.column(NUM_ENTRIES)
    pairs = rows.entries[entry_row.clamp(min=0), : 2 * rows.max_entries].unflatten(1, (-1, 2))
    real = torch.arange(rows.max_entries, device=out.device) < num_entries[:, None]
    packed = torch.where(real, pairs[:, :, 0], 0)
    bias = pairs[:, :, 1].contiguous().view(torch.float32)
    ids = (packed & (IS_END - 1)).long()
    x = logits.gather(1, ids).float()
    biased = x + bias.masked_fill(bias == -torch.inf, 0)
    if rows.seen is not None:
        biased = penalize_torch(biased, ids, rows)
    position = rows.positions[rows.logits_indices]
    is_short = position + 1 - rows.history.prompt_len[rows.slots] < rows.column(MIN_TOKENS)
    banned = (bias == -torch.inf) | ((packed >= IS_END) & is_short[:, None])
    wanted = torch.where(banned & ~x.isnan(), -torch.inf, biased)
    for row in range(len(out)):
        out[row, ids[row, real[row]]] = wanted[row, real[row]]


@triton.jit
def _logit_entries_kernel(
    logits,
    logits_stride,
    slots,
    logits_indices,
    num_drafts,
    input_ids,
    positions,
    prompt_len,
    table,
    table_stride,
    entries,
    entries_stride,
    seen,
    seen_stride,
    out,
    out_stride,
    HAS_SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block of the entries of one row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at = table + slot * table_stride
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # A slot without a row of entries has none to count.
    inside = entry < tl.load(at + _NUM_ENTRIES)
    pair = entries + tl.load(at + _ENTRY_ROW).to(tl.int64) * entries_stride + 2 * entry
    packed = tl.load(pair, mask=inside, other=0)
    bias = tl.load(pair + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
    ids = packed & (_IS_END - 1)
    raw = tl.load(logits + row * logits_stride + ids, mask=inside, other=0).to(tl.float32)

    forbidden = bias == -float("inf")
    x = raw + tl.where(forbidden, 0.0, bias)
    index = tl.load(logits_indices + row)
    if HAS_SEEN:
        x = penalize(x, ids, inside, at, seen, seen_stride, input_ids, index, tl.load(num_drafts + row))
    output_len = tl.load(positions + index) + 1 - tl.load(prompt_len + slot)
    is_short = output_len < tl.load(at + _MIN_TOKENS)
    banned = forbidden | ((packed >= _IS_END) & is_short)
    tl.store(out + row * out_stride + ids, tl.where(banned & (raw == raw), -float("inf"), x), mask=inside)


def logit_entries_triton(logits: torch.Tensor, rows: OptionRows, out: torch.Tensor) -> None:
    """One program for every block of entries of every row, as wide as the batch's longest list."""
    assert rows.entries is not None
    _logit_entries_kernel[(logits.shape[0], triton.cdiv(rows.max_entries, _BLOCK))](
        logits,
        logits.stride(0),
        rows.slots,
        rows.logits_indices,
        rows.num_drafts,
        rows.input_ids,
        rows.positions,
        rows.history.prompt_len,
        rows.options,
        rows.options.stride(0),
        rows.entries,
        rows.entries.stride(0),
        rows.seen,
        0 if rows.seen is None else rows.seen.stride(0),
        out,
        out.stride(0),
        HAS_SEEN=rows.seen is not None,
        BLOCK=_BLOCK,
    )


def logit_entries(logits: torch.Tensor, rows: OptionRows, out: torch.Tensor) -> None:
    """Change `out` where the rows' slots have entries; see the module's formula and shapes."""
    run = logit_entries_triton if use_triton(logits) else logit_entries_torch
    run(logits, rows, out)
