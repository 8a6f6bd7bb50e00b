"""Bad words of several tokens: the token that would complete one is masked.

For every word w of the slot of a row, of m tokens, and the tokens h that come before the sampled one, last first:

    out[row, w[m - 1]] = -inf   if h[i] == w[m - 2 - i] for every i < m - 1      (a NaN stays)

h is the history of the request, prompt included; at a row with drafts before it, its last num_drafts[row] tokens are
the step's own: h[i] = input_ids[logits_indices[row] - i] for i < num_drafts[row], else
all_token_ids[slot, position - i].

out float32 [n, vocab_size]; the rest in `OptionRows`.
"""

from __future__ import annotations

import torch

from core_runner.sampling.option_rows import NUM_WORDS, WORD_ROW, OptionRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 32
_NUM_WORDS, _WORD_ROW = tl.constexpr(NUM_WORDS), tl.constexpr(WORD_ROW)


def bad_words_torch(rows: OptionRows, out: torch.Tensor) -> None:
    """Plain torch twin, word by word."""
    assert rows.words is not None
    word_row, num_words = rows.column(WORD_ROW).tolist(), rows.column(NUM_WORDS).tolist()
    for row in range(len(out)):
        if num_words[row]:
            table = rows.words[word_row[row]].tolist()
            words = [table[table[w] : table[w + 1]] for w in range(num_words[row])]
            tokens = _last_tokens(rows, row, max(map(len, words)) - 1)
            last = [
                w[-1]
                for w in words
                if tokens[len(tokens) - len(w) + 1 :] == w[:-1] and len(w) <= len(tokens) + 1
            ]
            values = out[row, last]
            out[row, last] = torch.where(values.isnan(), values, -torch.inf)


def _last_tokens(rows: OptionRows, row: int, count: int) -> list[int]:
    """Up to `count` tokens before the one that is sampled for the row, in order."""
    index, num_drafts = int(rows.logits_indices[row]), int(rows.num_drafts[row])
    known = int(rows.positions[index]) + 1 - num_drafts
    history = rows.history.all_token_ids[int(rows.slots[row]), max(known - count, 0) : known]
    tokens = history.tolist() + rows.input_ids[index + 1 - num_drafts : index + 1].tolist()
    return tokens[max(len(tokens) - count, 0) :]


@triton.jit
def _bad_words_kernel(
    slots,
    logits_indices,
    num_drafts,
    input_ids,
    positions,
    all_token_ids,
    all_token_ids_stride,
    table,
    table_stride,
    words,
    words_stride,
    out,
    out_stride,
    BLOCK: tl.constexpr,
) -> None:
    """One block of the words of one row, a lane for each."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at = table + slot * table_stride
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < tl.load(at + _NUM_WORDS)
    table = words + tl.load(at + _WORD_ROW).to(tl.int64) * words_stride
    start = tl.load(table + word, mask=inside, other=0)
    end = tl.load(table + word + 1, mask=inside, other=1)
    before = end - start - 1

    index, drafts = tl.load(logits_indices + row), tl.load(num_drafts + row)
    position = tl.load(positions + index)
    past = all_token_ids + slot * all_token_ids_stride + position
    matched = inside & (before <= position + 1)
    for back in range(0, tl.max(before, axis=0)):
        draft = tl.load(input_ids + index - back, mask=back < drafts, other=0).to(tl.int32)
        known = tl.load(past - back, mask=(back <= position) & (back >= drafts), other=0)
        wanted = tl.load(table + end - 2 - back, mask=matched & (back < before), other=0)
        matched = matched & ((back >= before) | (wanted == draft + known))
    last = tl.load(table + end - 1, mask=matched, other=0)
    target = out + row * out_stride + last
    x = tl.load(target, mask=matched, other=0)
    tl.store(target, tl.where(x == x, -float("inf"), x), mask=matched)


def bad_words_triton(rows: OptionRows, out: torch.Tensor) -> None:
    """One program for every block of words of every row, as many as the batch's longest list needs."""
    assert rows.words is not None
    _bad_words_kernel[(out.shape[0], triton.cdiv(rows.max_words, _BLOCK))](
        rows.slots,
        rows.logits_indices,
        rows.num_drafts,
        rows.input_ids,
        rows.positions,
        rows.history.all_token_ids,
        rows.history.all_token_ids.stride(0),
        rows.options,
        rows.options.stride(0),
        rows.words,
        rows.words.stride(0),
        out,
        out.stride(0),
        BLOCK=_BLOCK,
    )


def bad_words(rows: OptionRows, out: torch.Tensor) -> None:
    """Mask the ids in `out` that would complete a word; see the module's formula and shapes."""
    run = bad_words_triton if use_triton(out) else bad_words_torch
    run(rows, out)
