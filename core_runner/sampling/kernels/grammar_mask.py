"""Packed masks of allowed ids, applied to the rows of logits that have one.

    logits[rows[i], id] = -inf   where bit id % 32 of words[i, id // 32] is 0, unless the logit is NaN

A NaN stays, masked or not: the row must fail. Rows without a mask are neither read nor written.

logits [n, >= vocab_size] (any float type, strided rows), changed in place; rows int32 [m], each at most once;
words int32 [m, ceil(vocab_size / 32)].
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 4096


def grammar_mask_torch(
    logits: torch.Tensor, vocab_size: int, rows: torch.Tensor, words: torch.Tensor
) -> None:
    """Plain torch twin."""
    ids = torch.arange(vocab_size, device=logits.device)
    forbidden = (words[:, ids // 32] >> (ids % 32)) & 1 == 0
    x = logits[rows.long(), :vocab_size]
    logits[rows.long(), :vocab_size] = torch.where(forbidden & ~x.isnan(), -torch.inf, x)


@triton.jit
def _grammar_mask_kernel(
    logits,
    logits_stride,
    vocab_size,
    rows,
    words,
    words_stride,
    BLOCK: tl.constexpr,
) -> None:
    """One block of one mask."""
    mask_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask_idx).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    bits = tl.load(words + mask_idx * words_stride + ids // 32, mask=inside, other=-1)
    forbidden = inside & ((bits >> (ids % 32)) & 1 == 0)
    # Allowed logits are not read: a grammar that allows little costs one write, one that allows much nothing.
    x = tl.load(logits + row * logits_stride + ids, mask=forbidden, other=0.0).to(tl.float32)
    tl.store(logits + row * logits_stride + ids, float("-inf"), mask=forbidden & (x == x))


def grammar_mask_triton(
    logits: torch.Tensor, vocab_size: int, rows: torch.Tensor, words: torch.Tensor
) -> None:
    """One program for every block of every mask."""
    _grammar_mask_kernel[(len(rows), triton.cdiv(vocab_size, _BLOCK))](
        logits, logits.stride(0), vocab_size, rows, words, words.stride(0), BLOCK=_BLOCK
    )


def grammar_mask(logits: torch.Tensor, vocab_size: int, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Mask `logits` in place; see the module's formula and shapes."""
    run = grammar_mask_triton if use_triton(logits) else grammar_mask_torch
    run(logits, vocab_size, rows, words)
