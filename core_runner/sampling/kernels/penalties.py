"""Penalties for ids that a request holds already, and the counts that they are made from.

    count(id)    = times the output, drafts before the row included, holds the id
    x1           = x / repetition if x > 0, else x * repetition        where prompt or output hold the id, else x
    penalized(x) = x1 - frequency * count(id) - presence * (count(id) > 0)

`count_tokens` brings the counts of each slot of a batch up to date: it takes in the tokens of its history from the last
counted one on. So it serves an admission, a resume and a step that accepted several tokens alike, and no token can be
counted twice or left out. A slot's row of counts is zero at admission.

idx_mapping int32 [num_rows]; the tables are those of `OptionRows`; options[:, NUM_COUNTED], seen and
seen_bits change in place.
"""

from __future__ import annotations

from typing import Any

import torch

from core_runner.sampling.kernels.overlay import held_torch
from core_runner.sampling.option_rows import (
    FREQUENCY,
    IN_PROMPT,
    NUM_COUNTED,
    PRESENCE,
    REPETITION,
    SEEN_ROW,
    OptionRows,
    TokenHistory,
)
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024
_WORDS = 128  # of bits, that a program goes through
_SEEN_ROW, _NUM_COUNTED = tl.constexpr(SEEN_ROW), tl.constexpr(NUM_COUNTED)
_REPETITION, _FREQUENCY, _PRESENCE = (
    tl.constexpr(REPETITION),
    tl.constexpr(FREQUENCY),
    tl.constexpr(PRESENCE),
)
_IN_PROMPT = tl.constexpr(IN_PROMPT)


def count_tokens_torch(
    idx_mapping: torch.Tensor,
    options: torch.Tensor,
    seen: torch.Tensor,
    seen_bits: torch.Tensor,
    history: TokenHistory,
) -> None:
    """Plain torch twin, slot by slot."""
    vocab_size = seen.shape[1]
    for slot in idx_mapping.tolist():
        row, start, end = (
            int(options[slot, SEEN_ROW]),
            int(options[slot, NUM_COUNTED]),
            history.total_len[slot],
        )
        if row < 0:
            continue
        ids = history.all_token_ids[slot, start:end].long()
        of_prompt = torch.arange(start, start + len(ids), device=ids.device) < history.prompt_len[slot]
        inside = (ids >= 0) & (ids < vocab_size)
        prompt, output = ids[of_prompt & inside], ids[~of_prompt & inside]
        seen[row, prompt] |= IN_PROMPT
        seen[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        held = torch.nn.functional.pad(seen[row] != 0, (0, 32 * seen_bits.shape[1] - vocab_size))
        bits = held.unflatten(0, (-1, 32)).long() << torch.arange(32, device=held.device)
        seen_bits[row] = bits.sum(dim=1).to(torch.int32)
        options[slot, NUM_COUNTED] = end


def penalize_torch(x: torch.Tensor, ids: torch.Tensor, rows: OptionRows) -> torch.Tensor:
    """Penalized values of x float32 [num_logits, m], which are of ids int64 [num_logits, m]."""
    assert rows.seen is not None
    row = rows.column(SEEN_ROW)[:, None]
    seen = torch.where(row >= 0, rows.seen[row.clamp(min=0), ids], 0)
    for back in range(int(rows.num_drafts.max()) if len(ids) else 0):
        token = rows.input_ids[(rows.logits_indices - back).clamp(min=0)]
        seen = seen + ((ids == token[:, None]) & (back < rows.num_drafts)[:, None])
    repetition, frequency, presence = (
        rows.float_column(column)[:, None] for column in (REPETITION, FREQUENCY, PRESENCE)
    )
    count = seen & (IN_PROMPT - 1)
    penalized = torch.where(seen != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    penalized = penalized - frequency * count - presence * (count > 0)
    return torch.where(row >= 0, penalized, x)


def penalized_values_torch(
    logits: torch.Tensor, vocab_size: int, rows: OptionRows, out: torch.Tensor
) -> None:
    """Plain torch twin."""
    x = logits[:, :vocab_size].float()
    ids = torch.arange(vocab_size, device=x.device).expand(len(x), -1)
    out.copy_(torch.where(held_torch(rows, vocab_size), penalize_torch(x, ids, rows), out))


@triton.jit
def penalize(x, ids, inside, at, seen, seen_stride, input_ids, index, num_drafts) -> Any:
    """Penalized values of x float32 [m], which are of ids int [m]; at: the slot's row of options."""
    row = tl.load(at + _SEEN_ROW).to(tl.int64)
    if row >= 0:
        repetition = tl.load(at + _REPETITION).to(tl.float32, bitcast=True)
        frequency = tl.load(at + _FREQUENCY).to(tl.float32, bitcast=True)
        presence = tl.load(at + _PRESENCE).to(tl.float32, bitcast=True)
        held = tl.load(seen + row * seen_stride + ids, mask=inside, other=0)
        for back in range(0, num_drafts):
            held += (ids == tl.load(input_ids + index - back)).to(tl.int32)
        count = held & (_IN_PROMPT - 1)
        scaled = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(held != 0, scaled, x)
        x = x - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
    return x


@triton.jit
def _penalized_values_kernel(
    logits,
    logits_stride,
    vocab_size,
    slots,
    logits_indices,
    num_drafts,
    input_ids,
    table,
    table_stride,
    seen,
    seen_bits,
    seen_stride,
    out,
    out_stride,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK words of bits of one row, and in the first program the drafts: one id of every word after another."""
    row = tl.program_id(0).to(tl.int64)
    at = table + tl.load(slots + row).to(tl.int64) * table_stride
    seen_row = tl.load(at + _SEEN_ROW).to(tl.int64)
    if seen_row >= 0:
        index, drafts = tl.load(logits_indices + row), tl.load(num_drafts + row)
        base, out = logits + row * logits_stride, out + row * out_stride
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(seen_bits + seen_row * seen_stride + place, mask=place * 32 < vocab_size, other=0)
        while tl.max((word != 0).to(tl.int32), axis=0) > 0:
            lowest = word & (~word + 1)
            # The exponent of a power of two.
            bit = (lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            ids, inside = place * 32 + bit, word != 0
            x = tl.load(base + ids, mask=inside, other=0).to(tl.float32)
            x = penalize(x, ids, inside, at, seen, seen_stride, input_ids, index, drafts)
            tl.store(out + ids, x, mask=inside)
            word = word ^ lowest
        if tl.program_id(1) == 0:
            for first in range(0, drafts, BLOCK):
                back = first + tl.arange(0, BLOCK)
                ids = tl.load(input_ids + index - back, mask=back < drafts, other=-1)
                inside = (ids >= 0) & (ids < vocab_size)
                x = tl.load(base + ids, mask=inside, other=0).to(tl.float32)
                x = penalize(x, ids, inside, at, seen, seen_stride, input_ids, index, drafts)
                tl.store(out + ids, x, mask=inside)


def penalized_values_triton(
    logits: torch.Tensor, vocab_size: int, rows: OptionRows, out: torch.Tensor
) -> None:
    """One program for every block of words of every row."""
    assert rows.seen is not None
    assert rows.seen_bits is not None
    _penalized_values_kernel[(logits.shape[0], triton.cdiv(vocab_size, 32 * _WORDS))](
        logits,
        logits.stride(0),
        vocab_size,
        rows.slots,
        rows.logits_indices,
        rows.num_drafts,
        rows.input_ids,
        rows.options,
        rows.options.stride(0),
        rows.seen,
        rows.seen_bits,
        rows.seen.stride(0),
        out,
        out.stride(0),
        BLOCK=_WORDS,
        num_warps=1,
    )


def penalized_values(logits: torch.Tensor, vocab_size: int, rows: OptionRows, out: torch.Tensor) -> None:
    """Write `penalized` of every id that a row holds to `out`, and nothing of the others; shapes as in `overlay`."""
    run = penalized_values_triton if use_triton(logits) else penalized_values_torch
    run(logits, vocab_size, rows, out)


@triton.jit
def _count_tokens_kernel(
    idx_mapping,
    table,
    table_stride,
    seen,
    seen_bits,
    seen_stride,
    vocab_size,
    all_token_ids,
    all_token_ids_stride,
    total_len,
    prompt_len,
    BLOCK: tl.constexpr,
) -> None:
    """One batch row. A slot is in a batch once, so no other program writes its row of counts."""
    slot = tl.load(idx_mapping + tl.program_id(0)).to(tl.int64)
    at = table + slot * table_stride
    row = tl.load(at + _SEEN_ROW).to(tl.int64)
    if row >= 0:
        end, prompt_end = tl.load(total_len + slot), tl.load(prompt_len + slot)
        for first in range(tl.load(at + _NUM_COUNTED), end, BLOCK):
            place = first + tl.arange(0, BLOCK)
            ids = tl.load(all_token_ids + slot * all_token_ids_stride + place, mask=place < end, other=-1)
            # An id may stand several times in one block, so only atomics count it right.
            inside = (ids >= 0) & (ids < vocab_size)
            target = seen + row * seen_stride + ids
            tl.atomic_or(target, _IN_PROMPT, mask=inside & (place < prompt_end), sem="relaxed")
            tl.atomic_add(target, 1, mask=inside & (place >= prompt_end), sem="relaxed")
            word = seen_bits + row * seen_stride + ids // 32
            tl.atomic_or(word, tl.full((BLOCK,), 1, tl.int32) << (ids & 31), mask=inside, sem="relaxed")
        tl.store(at + _NUM_COUNTED, end)


def count_tokens_triton(
    idx_mapping: torch.Tensor,
    options: torch.Tensor,
    seen: torch.Tensor,
    seen_bits: torch.Tensor,
    history: TokenHistory,
) -> None:
    """One program for every batch row."""
    _count_tokens_kernel[(idx_mapping.numel(),)](
        idx_mapping,
        options,
        options.stride(0),
        seen,
        seen_bits,
        seen.stride(0),
        seen.shape[1],
        history.all_token_ids,
        history.all_token_ids.stride(0),
        history.total_len,
        history.prompt_len,
        BLOCK=_BLOCK,
    )


def count_tokens(
    idx_mapping: torch.Tensor,
    options: torch.Tensor,
    seen: torch.Tensor,
    seen_bits: torch.Tensor,
    history: TokenHistory,
) -> None:
    """Count what the slots' histories hold since they were counted last; see the module's text and shapes."""
    run = count_tokens_triton if use_triton(seen) else count_tokens_torch
    run(idx_mapping, options, seen, seen_bits, history)
