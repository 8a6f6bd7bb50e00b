"""What a user gets back: completions, text deltas and counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One id's log-probability at one position, and its rank among all ids, from 1."""

    logprob: float
    rank: int


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    stop_reason: the stop string or stop token id that ended it; None for the model's own end or another reason.
    logprobs: for each generated token, id -> `Logprob` of the sampled and the best ids; None when not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and what became of it. `error` says why when the finish reason is "error".

    outputs: one completion for each of `SamplingParams.n`, by index. num_cached_tokens: of the first one.
    prompt_logprobs: for each prompt token, id -> `Logprob` of the token itself and of the best ids; None for the
    first one, which nothing predicts; None in all when not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one completion of a streamed prompt. Its deltas, joined, are its whole text.

    finish_reason comes with a completion's last delta; output, the whole result, with the prompt's last one.
    index: which of the prompt's completions it is.
    """

    request_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was built, and what is free now. elapsed_s: seconds spent in steps.

    cached_tokens, queried_tokens: tokens of admissions that the prefix cache held, of those that were looked up.
    cached_blocks: blocks that can be hit now, of all cache groups; there are never more than `num_blocks`.
    step_ways: how many steps were replays of a graph ("step graph", "forward graph"), and how many ran eagerly, by
    reason.
    """

    steps: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    elapsed_s: float
    free_blocks: int
    num_blocks: int
    free_slots: int
    max_num_reqs: int
    running: int
    waiting: int
    step_ways: dict[str, int]
    queried_tokens: int = 0
    cached_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up in the prefix cache that were found, 0 to 1."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0
