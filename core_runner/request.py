"""`Request`: everything the host knows of one request, from its arrival to its last token. No torch here."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from core_runner.errors import RequestError
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import PromptLogprobs
from core_runner.scheduling.prompt_group import PromptGroup

IntArray = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort", "error"]
_SEED_MASK = (1 << 63) - 1
_NO_IDS: frozenset[int] = frozenset()


class RequestStatus(Enum):
    """Where a request stands; every FINISHED_ value is final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOP = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORT = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """True for the final values."""
        return self not in _OPEN


_OPEN = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one emitted token: column 0 is the token itself, then the best ids in order."""

    token_ids: IntArray  # [n + 1]
    values: npt.NDArray[np.float32]  # [n + 1]
    rank: int  # of the emitted token, from 1


class TokenConstraint(Protocol):
    """What allows or forbids a request's next ids by the ones before, such as a grammar.

    A request that has one waits until it is ready, and is not scheduled ahead of tokens that are not known yet.
    """

    @property
    def error(self) -> str | None:
        """Why the constraint can serve no longer; the request ends with it."""

    def is_ready(self) -> bool:
        """Whether the request may run, or has an `error`; asked in every step while it waits."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take in tokens that the request got and goes on from; False, with an `error`, if they are not allowed."""


@dataclass(slots=True, eq=False)
class Request:
    """One request. The scheduler is its only writer once it is added; requests compare by identity.

    prompt_token_ids: the user's tokens, converted to int32 [prompt_len]. largest_token_id: of them; -1 for none.
    seed: stream of the request in [0, 2**63); None takes the parameters' seed, or draws one that is kept.
    group, index: the prompt's completions, where there are several, and which of them this is.
    reports_tokens: whether every step that brings tokens is reported, or the end alone.
    input_keys: names of the model inputs' content, by which prefix blocks are shared; the engine asks for them.
    stop_token_ids: ids that end the request; the scheduler adds the model's end ids at admission.
    arrival: order of arrival. rank: (priority or 0, arrival), smaller runs earlier. The scheduler sets both.
    max_total_len: most tokens of prompt and output together, set by the scheduler.
    approved_by: the scheduler that has found that it can serve the request, so that nobody looks again.
    num_cached_tokens: prefix hit of the first admission; -1 before it.
    num_in_flight: samples that were scheduled and are not known yet. It is kept here while the request is
        not running; for a running one the scheduler counts by slot.
    num_scored_tokens: with prompt_logprobs, leading tokens whose next id a scheduled step has scored.
    prompt_logprobs: what these steps have brought so far, in order of position.
    constraint: what its next ids must keep to; set before the request is added, or None.
    error: why the request ended with an error, where something better than the usual message is known.
    block_hashes: block size -> hash chain of the leading full blocks, extended by the prefix cache.
    """

    req_id: str
    prompt_token_ids: IntArray
    sampling_params: SamplingParams
    seed: int | None = None
    model_inputs: Mapping[str, Any] = field(default_factory=dict)
    group: PromptGroup | None = None
    index: int = 0
    reports_tokens: bool = True
    input_keys: Mapping[str, bytes] = field(default_factory=dict)
    largest_token_id: int = field(init=False)
    # Copied from the parameters, so that the scheduler reads one object.
    priority: int = field(init=False)
    cache_salt: str = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    slot: int = field(default=-1, init=False)
    arrival: int = field(default=-1, init=False)
    rank: tuple[int, int] = field(default=(0, -1), init=False)
    max_total_len: int = field(default=0, init=False)
    approved_by: object = field(default=None, init=False, repr=False)
    num_cached_tokens: int = field(default=-1, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_in_flight: int = field(default=0, init=False)
    num_scored_tokens: int = field(default=0, init=False)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list, init=False)
    constraint: TokenConstraint | None = field(default=None, init=False, repr=False)
    error: str | None = field(default=None, init=False)
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Convert the prompt, fix the seed, and copy what the scheduler reads from the parameters."""
        if type(self.model_inputs) is not dict and not isinstance(self.model_inputs, Mapping):
            raise RequestError(
                f"request {self.req_id!r}: model_inputs={self.model_inputs!r} must be a mapping"
            )
        self.prompt_token_ids, self.largest_token_id = _as_token_array(self.req_id, self.prompt_token_ids)
        params = self.sampling_params
        # The kernels take an unsigned stream number; a negative seed keeps one of its own.
        seed = params.seed if self.seed is None else self.seed
        self.seed = (secrets.randbits(63) if seed is None else int(seed)) & _SEED_MASK
        self.priority = params.priority
        self.cache_salt = params.cache_salt
        self.stop_token_ids = frozenset(params.stop_token_ids) if params.stop_token_ids else _NO_IDS

    @property
    def prompt_len(self) -> int:
        """Tokens of the user's prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and outputs."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_restored_tokens(self) -> int:
        """Leading prompt tokens whose state a model input brings: one that says so by an attribute of this name."""
        inputs = self.model_inputs.values()
        return max((int(getattr(value, "num_restored_tokens", 0)) for value in inputs), default=0)

    @property
    def prompt_id(self) -> str:
        """Name of the prompt, which its completions share."""
        return self.req_id if self.group is None else self.group.req_id

    @property
    def max_hit_len(self) -> int:
        """Most leading tokens that a prefix hit may spare.

        One token must be computed, and so must each whose next id is still to be scored.
        """
        num_to_score = 0 if self.sampling_params.prompt_logprobs is None else self.prompt_len - 1
        scored = self.num_scored_tokens
        return self.num_tokens - 1 if scored >= num_to_score else scored

    @property
    def is_finished(self) -> bool:
        """True once the request has ended, for whatever reason."""
        return self.status.is_finished

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it has not."""
        return self.status.value if self.is_finished else None  # type: ignore[return-value]

    def token_ids(self, start: int = 0, stop: int | None = None) -> IntArray:
        """Known tokens [start, stop) of prompt and outputs, int32 [stop - start]."""
        prompt_len = len(self.prompt_token_ids)
        stop = prompt_len + len(self.output_token_ids) if stop is None else stop
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        outputs = self.output_token_ids[max(0, start - prompt_len) : stop - prompt_len]
        tail = np.asarray(outputs, dtype=np.int32)
        return tail if start >= prompt_len else np.concatenate([self.prompt_token_ids[start:], tail])


def _as_token_array(req_id: str, token_ids: Sequence[int] | npt.NDArray[Any]) -> tuple[IntArray, int]:
    """The ids as int32 [n], and the largest; raises `RequestError` for what is no flat sequence of such."""
    plain = _from_list(token_ids) if type(token_ids) is list and token_ids else None
    return _checked_array(req_id, token_ids) if plain is None else plain


def _from_list(token_ids: list[int]) -> tuple[IntArray, int] | None:
    """The ids of an ordinary list that holds some, in a third of the time; None for one that has to be looked at."""
    try:
        # Of all types of numbers this one takes the least time, and it refuses negative ones.
        ids = np.frombuffer(array("I", token_ids), np.uint32)
    except (TypeError, OverflowError, ValueError):
        return None
    # The place of the largest is found in a fourth of the time that `max` takes for a few hundred.
    largest = int(ids[ids.argmax()])
    # Truth values would pass for 0 and 1.
    return (ids.view(np.int32), largest) if 1 < largest < 2**31 else None


def _checked_array(req_id: str, token_ids: Sequence[int] | npt.NDArray[Any]) -> tuple[IntArray, int]:
    try:
        ids = np.asarray(token_ids if len(token_ids) else np.zeros(0, np.int32))
    except (TypeError, ValueError) as error:  # None, a number, or rows of unequal lengths
        raise RequestError(
            f"request {req_id!r}: prompt_token_ids={token_ids!r} must be a flat sequence of integers"
        ) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(
            f"request {req_id!r}: prompt_token_ids must be a flat sequence of integers, not {ids.dtype} "
            f"of shape {list(ids.shape)}"
        )
    least, most = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
    if least < 0 or most >= 2**31:
        bad = least if least < 0 else most
        raise RequestError(f"request {req_id!r}: prompt token id {bad} is outside [0, 2**31)")
    return np.ascontiguousarray(ids, dtype=np.int32), most
