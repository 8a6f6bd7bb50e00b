"""Whether the options of a request leave any id that may be sampled: the check before it is admitted."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_runner.sampling_params import SamplingParams


def explain_nothing_left(
    params: SamplingParams, vocab_size: int | None = None, eos_token_ids: Collection[int] = ()
) -> str | None:
    """The options that together forbid every id for the first token, as an error message; None if one is left.

    vocab_size: None while it is not known, as are the model's end ids then. Only what is certain counts: of the bad
    words, single tokens.
    """
    if not _limits_ids(params):
        return None
    bans = [(text, ids) for text, ids in _bans(params, eos_token_ids) if ids]
    if params.allowed_token_ids is not None:
        left, options = set(params.allowed_token_ids), [_show("allowed_token_ids", params.allowed_token_ids)]
    elif vocab_size is not None and sum(len(ids) for _, ids in bans) >= vocab_size:
        left, options = set(range(vocab_size)), []
    else:
        return None
    for text, ids in bans:
        if not left.isdisjoint(ids):
            left -= ids
            options.append(text)
    if left:
        return None
    return (
        f"{' and '.join(options)} {'together ' if len(options) > 1 else ''}leave no id to sample; change one"
    )


def _limits_ids(params: SamplingParams) -> bool:
    """Whether any option could forbid an id, or name one that there is not."""
    if params.allowed_token_ids is not None:
        return True
    return bool(params.bad_words or params.logit_bias or params.min_tokens)


def explain_contradiction(
    params: SamplingParams, vocab_size: int | None, eos_token_ids: Collection[int]
) -> str | None:
    """Why these parameters cannot be served by a model with these ids, as an error message; None if they can."""
    if not _limits_ids(params):
        return None
    text = next((word for word in params.bad_words if isinstance(word, str)), None)
    if text is not None:
        return f"bad_words holds the text {text!r}, which only a tokenizer can turn into ids; give token sequences"
    outside = None if vocab_size is None else _explain_outside(params, vocab_size)
    return outside or explain_nothing_left(params, vocab_size, eos_token_ids)


def explain_failed_row(params: SamplingParams) -> str:
    """Why a request ended whose row of logits left nothing to sample."""
    bans = {
        "structured_output": params.structured_output is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "logit_bias": -math.inf in (params.logit_bias or {}).values(),
        "min_tokens": params.min_tokens > 0,
        "logits_processors": bool(params.logits_processors),
    }
    named = [name for name, is_used in bans.items() if is_used]
    if not named:
        return "the model's logits held NaN or allowed no token"
    return f"no id is left that {' and '.join(named)} allow, or the model's logits held NaN"


def _explain_outside(params: SamplingParams, vocab_size: int) -> str | None:
    """The option that names an id outside the vocabulary, as an error message; None if none does."""
    named: dict[str, Collection[int]] = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words": {token for word in params.bad_words if not isinstance(word, str) for token in word},
    }
    for name, ids in named.items():
        largest = max(ids, default=-1)
        if largest >= vocab_size:
            return f"{name} holds the id {largest}, which is outside the vocabulary of {vocab_size} ids"
    return None


def _bans(params: SamplingParams, eos_token_ids: Collection[int]) -> list[tuple[str, set[int]]]:
    """What forbids ids for the first token: the option as messages show it, and the ids."""
    words = [word for word in params.bad_words if not isinstance(word, str)]
    ends = {*params.stop_token_ids, *eos_token_ids} if params.min_tokens else set()
    return [
        (_show("bad_words", words), {word[0] for word in words if len(word) == 1}),
        (
            _show("logit_bias", params.logit_bias),
            {i for i, bias in (params.logit_bias or {}).items() if bias == -math.inf},
        ),
        (f"min_tokens={params.min_tokens} (which bans the end ids {reprlib.repr(sorted(ends))})", ends),
    ]


def _show(name: str, value: object) -> str:
    """The option with its value, shortened: a list of ids may be as long as the vocabulary."""
    return f"{name}={reprlib.repr(value)}"
