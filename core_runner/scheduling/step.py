"""The scheduler's nouns: its settings, a scheduled step, what a step brought, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from core_runner.errors import ConfigError
from core_runner.request import FinishReason, Request, TokenLogprobs
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import SchedulerOutput
from core_runner.scheduling.prompt_logprobs import PromptLogprobsLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of a scheduler; fields of `RunnerConfig` mean what they mean there, with every number decided.

    vocab_size: prompt ids must be below it; None checks nothing. enable_chunked_prefill: False computes every
    prefill in one step, so that a request is limited to `max_num_batched_tokens` computed tokens.
    share_prompts: completions of one prompt share its blocks, also without prefix caching; False is for a model
    that cannot. prompt_logprobs: bounds for requests that ask for them; None sets none.
    explain_refusal: why the runner cannot serve these parameters, None if it can; asked at admission.
    reserve: what an admission lacks beside blocks, empty if nothing; asked last, so that an admission follows.
    expect: told of requests that still wait, the first ones more or less, whenever a step is planned anew.
    """

    max_num_reqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting: int = 100_000
    enable_prefix_caching: bool = True
    num_draft_tokens: int = 0
    vocab_size: int | None = None
    enable_chunked_prefill: bool = True
    share_prompts: bool = True
    prompt_logprobs: PromptLogprobsLimits | None = None
    explain_refusal: Callable[[SamplingParams], str | None] | None = None
    reserve: Callable[[Request], Mapping[str, str]] | None = None
    expect: Callable[[Sequence[Request]], None] | None = None

    def __post_init__(self) -> None:
        """Refuse values with which no step could be scheduled."""
        for name in ("max_num_reqs", "max_model_len", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_draft_tokens < 0:
            raise ConfigError(f"num_draft_tokens={self.num_draft_tokens} must be at least 0")
        if self.max_num_batched_tokens < 1 + self.num_draft_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than a row of a decode step, "
                f"1 + num_draft_tokens={self.num_draft_tokens}"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy={self.policy!r} is not one of 'fcfs', 'priority'")


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """A step on its way: hand `output` to the runner and the step back to `Scheduler.update`."""

    output: SchedulerOutput
    requests: Sequence[Request]  # of each batch row
    outputs: Sequence[list[int]]  # `output_token_ids` of these requests
    samples: npt.NDArray[np.bool_]  # rows that compute their last known token, [num_reqs]
    generations: npt.NDArray[np.int64]  # of each row's slot when the step was scheduled, [num_reqs]
    constrained: npt.NDArray[np.intp]  # rows whose sample a request's constraint narrows, [n]
    num_changes: int  # `SlotTable.num_changes` when the step was scheduled
    is_plain: bool  # every row decodes one token that is neither its last nor to be looked at
    any_reports: bool  # a row's every token is reported


class RequestUpdate(NamedTuple):
    """What one step brought to one request: its new tokens, and why it ended if it did."""

    request: Request
    new_token_ids: Sequence[int]
    finish_reason: FinishReason | None
    new_logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Free counts and sizes now, then totals since the start."""

    free_slots: int
    free_blocks: tuple[int, ...]  # per cache group; blocks that can be hit are free too
    running: int
    waiting: int
    prompt_tokens: int  # of requests admitted for the first time
    generated_tokens: int
    cached_tokens: int  # tokens that admissions found in the prefix cache
    queried_tokens: int  # tokens that admissions looked up
    cached_blocks: tuple[int, ...]  # blocks of each group that can be hit, held or free
    preemptions: int
