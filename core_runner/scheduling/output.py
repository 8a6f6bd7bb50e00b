"""What a scheduler hands to the runner, and what it gets back. Bring your own scheduler by emitting these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from core_runner.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
RemoveReason = Literal["finished", "preempted", "aborted", "interrupted"]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """An admission: a new request, or one that resumes after a preemption (`prefill_len > prompt_len`).

    slot: a free row in [0, R), chosen by the scheduler and kept until the request is removed.
    prefill_token_ids: every token known so far, [prefill_len]; the first `prompt_len` are the user's.
    num_computed_tokens: tokens whose state is in the cache already (a prefix hit); less than prefill_len.
    seed: stream of the request, in [0, 2**63); the same on every admission of one request.
    num_scored_tokens: with prompt_logprobs, leading tokens whose next id was scored in earlier steps. The runner
        scores the rest of the prompt, so `num_computed_tokens` must not skip any of it.
    model_inputs: what a model state needs beside tokens (audio features, ...); opaque to the core.
    input_keys: what the hook `input_keys` says of them; empty has each model state find out by itself.
    """

    req_id: str
    slot: int
    prefill_token_ids: Sequence[int] | npt.NDArray[np.int32]
    prompt_len: int
    sampling_params: SamplingParams
    seed: int
    num_computed_tokens: int = 0
    num_scored_tokens: int = 0
    model_inputs: Mapping[str, Any] = field(default_factory=dict)
    input_keys: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def prefill_len(self) -> int:
        """Tokens handed in for prefill."""
        return len(self.prefill_token_ids)

    @property
    def prompt_token_ids(self) -> Sequence[int] | npt.NDArray[np.int32]:
        """Those of them that are the user's, [prompt_len]."""
        return self.prefill_token_ids[: self.prompt_len]


@dataclass(frozen=True, slots=True)
class RemovedRequest:
    """A slot that is given up before this step's admissions, and why."""

    slot: int
    reason: RemoveReason


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Block-table entries that change before this step, of one cache group.

    A run of `lengths[i]` ids is written to row `slots[i]` from column `starts[i]` on; `block_ids` holds the
    runs one after another. An admission's whole row is such a run from column 0.
    """

    slots: IntArray  # [num_runs]
    starts: IntArray  # [num_runs]
    lengths: IntArray  # [num_runs]
    block_ids: IntArray  # [sum(lengths)]


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """Ids that some of a step's samples may take, as packed bits; every other sample is free.

    Mask i is for slot `slots[i]` and its sample `positions[i]`: 0 is the first that the step draws for the slot,
    j the one after j drafts. Each pair comes at most once, and only for a slot that samples in this step.
    words: bit k of words[i, w] allows id 32 w + k. It may be a function that gives them: the runner calls it once,
    when the model's work is queued, so that filling masks takes no time of the device.
    """

    slots: IntArray  # [n]
    positions: IntArray  # [n]
    words: IntArray | Callable[[], IntArray]  # [n, ceil(vocab_size / 32)]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Applied in the order of the fields: removals, admissions, block updates, then the batch.

    A row may sample when it computes the last known token: `num_computed_tokens + num_scheduled_tokens >=
    prefill_len`. `num_computed_tokens` is the scheduler's upper bound; the device's copy is the truth.
    """

    removed: Sequence[RemovedRequest]
    new_requests: Sequence[NewRequest]
    block_updates: Sequence[BlockUpdate]  # one per cache group
    slots: IntArray  # batch_idx -> slot, [num_reqs]; each slot at most once
    num_scheduled_tokens: IntArray  # [num_reqs], at least 1
    num_computed_tokens: IntArray  # [num_reqs], before this step
    num_draft_tokens: IntArray | None = None  # [num_reqs], within num_scheduled_tokens; None: no drafts
    grammar_bitmask: GrammarBitmask | None = None  # None: no sample of this step is constrained
    # Both are for `Scheduler`. Trusted: right by construction, so that the runner checks it in poison mode alone.
    # Repeat: the rows of the step before, each decoding one token further; `slots` and `num_scheduled_tokens` are
    # the same objects, and beside them only `block_updates` may hold something.
    is_trusted: bool = False
    is_repeat: bool = False

    @classmethod
    def empty(
        cls, num_groups: int, removed: Sequence[RemovedRequest] = (), is_trusted: bool = False
    ) -> SchedulerOutput:
        """A step without rows, to give slots back or to run padding alone."""
        none = np.zeros(0, np.int32)
        updates = (BlockUpdate(none, none, none, none),) * num_groups
        return cls(removed, (), updates, none, none, none, is_trusted=is_trusted)

    @property
    def num_reqs(self) -> int:
        """Rows of the batch."""
        return len(self.slots)

    @property
    def total_num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.num_scheduled_tokens.sum())


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of sampled positions; column 0 is the sampled id, then the best ids in order."""

    token_ids: npt.NDArray[np.int32]  # [num_reqs, K + 1, n + 1]
    values: npt.NDArray[np.float32]  # [num_reqs, K + 1, n + 1]
    ranks: npt.NDArray[np.int32]  # [num_reqs, K + 1], rank of the sampled id, from 1


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of m prompt ids, one after another; column 0 is the id itself, then the best in order."""

    token_ids: npt.NDArray[np.int32]  # [m, n + 1]
    values: npt.NDArray[np.float32]  # [m, n + 1]
    ranks: npt.NDArray[np.int32]  # [m], rank of the prompt's id, from 1


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step sampled, row by row in the order of its `SchedulerOutput.slots`.

    num_sampled[i] is 0 for a prefill chunk that is not the last; ids beyond it are undefined.
    num_rejected[i] counts drafts of the row that were not accepted. failed[i] marks a row whose logits held
    NaN or allowed no id: its request ends with an error and no other does. prompt_logprobs: batch row -> the
    prompt ids that the row's chunk scored; a request's chunks bring them in order, each id once.
    """

    sampled_token_ids: npt.NDArray[np.int32]  # [num_reqs, K + 1]
    num_sampled: IntArray  # [num_reqs]
    num_rejected: IntArray  # [num_reqs]
    failed: npt.NDArray[np.bool_]  # [num_reqs]
    logprobs: Logprobs | None = None
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
