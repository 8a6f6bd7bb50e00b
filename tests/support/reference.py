"""The oracle: transformers' own generate in fp32, and the rule by which a result must equal it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MARGIN = 1e-3
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one prompt, and the log-probabilities of every id at every position."""

    token_ids: list[int]
    logprobs: torch.Tensor  # [num_tokens, vocab_size]


@torch.no_grad()
def greedy_reference(
    model: Any, prompt: Sequence[int], max_tokens: int, ignore_eos: bool = True
) -> Reference:
    """transformers.generate on this prompt alone."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens if ignore_eos else None,
        eos_token_id=None if ignore_eos else model.config.eos_token_id,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(out.logits).float()
    return Reference(out.sequences[0, len(prompt) :].tolist(), torch.log_softmax(logits, -1).cpu())


def assert_exact(got: Any, want: Reference, label: str = "") -> int:
    """Same ids, logprobs within 1e-4. Where the oracle's top-2 margin is under 1e-3 the rest is not compared;
    returns how many positions were skipped that way.
    """
    tokens = got.token_ids
    assert len(tokens) == len(want.token_ids), f"{label}: {len(tokens)} tokens, not {len(want.token_ids)}"
    for position, (token, expected) in enumerate(zip(tokens, want.token_ids, strict=True)):
        row = want.logprobs[position]
        if token != expected:
            best = row.topk(2).values
            margin = float(best[0] - best[1])
            assert margin < MARGIN, (
                f"{label}: token {position} is {token}, not {expected} (margin {margin:.4f})"
            )
            return len(tokens) - position
        if got.logprobs is not None:
            logprob = got.logprobs[position][token].logprob
            assert abs(logprob - float(row[token])) < LOGPROB_TOLERANCE, (
                f"{label}: logprob of token {position} is {logprob:.6f}, not {float(row[token]):.6f}"
            )
    return 0


def assert_wholly_exact(got: Any, want: Reference, label: str = "") -> None:
    """`assert_exact` of what has a margin everywhere: no position is skipped."""
    skipped = assert_exact(got, want, label)
    assert skipped == 0, f"{label}: {skipped} positions had too small a margin to compare"
