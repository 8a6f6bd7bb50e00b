"""Which requests may wait at all, and which of those that wait get a slot in this step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from core_runner.allowed_ids import explain_contradiction
from core_runner.errors import RequestError
from core_runner.request import Request, RequestStatus
from core_runner.scheduling.cache_manager import CacheManager
from core_runner.scheduling.hit_watch import HitWatch
from core_runner.scheduling.output import IntArray, NewRequest
from core_runner.scheduling.queue import WaitingQueue
from core_runner.scheduling.slots import SlotTable
from core_runner.scheduling.step import SchedulerConfig

_NUM_EXPECTED: Final = 32


class AdmissionRules:
    """Checks a new request against the limits of the configuration and of the block pools."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager, eos_token_ids: Collection[int]) -> None:
        self._config = config
        self._cache = cache
        self._eos_token_ids = eos_token_ids
        self._roomy_len = self._find_roomy_len(config.max_model_len)

    def max_total_len(self, request: Request) -> int:
        """Most tokens of prompt and output; raises `RequestError` if they could never run."""
        config, params, prompt_len = self._config, request.sampling_params, request.prompt_len
        self._check_prompt(request, prompt_len)
        problem = explain_contradiction(params, config.vocab_size, self._eos_token_ids)
        if problem is not None:
            raise RequestError(f"{_name(request)}: {problem}")
        max_tokens = self._roomy_len - prompt_len if params.max_tokens is None else params.max_tokens
        limit = min(prompt_len + max(max_tokens, 1), config.max_model_len)
        if limit > self._roomy_len:
            self._check_room(request, prompt_len, limit)
        if params.min_tokens > limit - prompt_len:
            raise RequestError(
                f"{_name(request)}: min_tokens={params.min_tokens} cannot be reached: a prompt of {prompt_len} tokens "
                f"leaves {limit - prompt_len} of max_model_len={config.max_model_len}"
            )
        if config.prompt_logprobs is not None:
            config.prompt_logprobs.check(request)
        if config.explain_refusal is not None:
            problem = config.explain_refusal(params)
            if problem is not None:
                raise RequestError(f"{_name(request)}: {problem}")
        return limit

    def _check_prompt(self, request: Request, prompt_len: int) -> None:
        limit, vocab_size = self._config.max_model_len, self._config.vocab_size
        if prompt_len == 0:
            raise RequestError(f"{_name(request)}: the prompt is empty; give at least one token")
        if prompt_len + 1 > limit:
            raise RequestError(
                f"{_name(request)}: a prompt of {prompt_len} tokens and one output exceed max_model_len={limit}; "
                "shorten the prompt or raise max_model_len"
            )
        largest = request.largest_token_id
        if vocab_size is not None and largest >= vocab_size:
            raise RequestError(
                f"{_name(request)}: prompt token id {largest} is outside the vocabulary of {vocab_size} ids"
            )

    def _find_roomy_len(self, limit: int) -> int:
        """Longest total, up to `limit`, that always fits; the last token is never computed."""
        if not self._config.enable_chunked_prefill:
            limit = min(limit, self._config.max_num_batched_tokens + 1)
        return self._cache.max_tokens_alone(limit - 1) + 1

    def _check_room(self, request: Request, prompt_len: int, limit: int) -> None:
        budget, shortage = self._config.max_num_batched_tokens, self._cache.find_shortage(limit - 1)
        exceeds_step = not self._config.enable_chunked_prefill and limit - 1 > budget
        if shortage is None and not exceeds_step:
            return
        sizes = f"{_name(request)}: {prompt_len} prompt and {limit - prompt_len} output tokens"
        if exceeds_step:
            # After a preemption all of them may have to be computed again in one step.
            raise RequestError(
                f"{sizes} exceed max_num_batched_tokens={budget}, and this model cannot prefill in chunks; "
                "lower max_tokens or raise max_num_batched_tokens"
            )
        assert shortage is not None, "one of the two is there"
        group, needed, usable = shortage
        raise RequestError(
            f"{sizes} need {needed} blocks of cache group {group}, which has {usable}; "
            "lower max_tokens or raise num_blocks"
        )


class Admission:
    """Moves waiting requests into slots, in the order of the queue: the first one that must wait holds up all.

    num_prompt_tokens, num_cached_tokens, num_queried_tokens: totals for the statistics.
    """

    def __init__(
        self, config: SchedulerConfig, slots: SlotTable, cache: CacheManager, queue: WaitingQueue
    ) -> None:
        self._config, self._slots, self._cache, self._queue = config, slots, cache, queue
        # Arrival of the request that lacked blocks last, and the blocks that were free then.
        self._blocked: tuple[int, tuple[int, ...]] = (-1, ())
        self._refused = -1  # arrival of the request that `reserve` refused last
        self._told = -1  # `num_changes` of the queue when somebody was told who waits
        self.num_prompt_tokens = self.num_cached_tokens = self.num_queried_tokens = 0
        self._watch = HitWatch(cache.alignment)

    def admit(self, budget: int) -> tuple[list[NewRequest], IntArray, IntArray]:
        """Admissions within `budget` tokens, their slots and the tokens of their first chunks, each [n]."""
        admitted: list[NewRequest] = []
        counts: list[int] = []
        while budget > 0 and self._slots.num_free:
            request = self._queue.peek()
            # A preempted request comes back only when all its tokens are known.
            if request is None or request.num_in_flight or self._is_still_blocked(request):
                break
            new_request, count = self._admit_first(request, budget)
            if new_request is None:
                break
            admitted.append(new_request)
            counts.append(count)
            budget -= count
        slots = np.array([new.slot for new in admitted], np.int32)
        return admitted, slots, np.array(counts, np.int32)

    def is_stuck(self) -> bool:
        """Whether `admit` would let nobody in, and nobody is to be told who waits: the first one still lacks blocks or
        what is reserved, or the others' prompt is still to be computed.
        """
        if self._config.expect is not None and self._told != self._queue.num_changes:
            return False
        request = self._queue.peek()
        return request is None or self._is_still_blocked(request) or self._is_still_refused(request)

    def tell(self) -> None:
        """Tell whoever wants to know who waits."""
        if self._config.expect is not None:
            self._config.expect(self._queue.near_front(_NUM_EXPECTED))
            self._told = self._queue.num_changes

    def _is_still_blocked(self, request: Request) -> bool:
        """Whether the request lacked blocks before and no group has more free ones now.

        It saves the look-up of a long prompt in every step. It cannot wait for ever: it lacked blocks because
        running requests held some, and when they end there are more.
        """
        arrival, num_free = self._blocked
        if arrival != request.arrival:
            return False
        return all(now <= then for now, then in zip(self._cache.num_free_blocks, num_free, strict=True))

    def _is_still_refused(self, request: Request) -> bool:
        """Whether the model refused the request before and does again; if it does not, `admit` comes in this step."""
        reserve = self._config.reserve
        return reserve is not None and request.arrival == self._refused and bool(reserve(request))

    def _admit_first(self, request: Request, budget: int) -> tuple[NewRequest | None, int]:
        """Admit the queue's first request with a first chunk, or leave it there: (None, 0)."""
        # Looked up anew on every admission: the hit of a resumed request reaches into its outputs.
        hit = self._cache.get_hit(request)
        # Lengths come after the look-up that changes them.
        num_tokens, num_cached = request.num_tokens, hit.num_tokens
        left = num_tokens - num_cached
        if left > budget and not self._config.enable_chunked_prefill:
            return None, 0
        # One that gave way before must leave each running request its next block, or it soon gives way again.
        headroom = self._slots.num_running if request.num_preemptions else 0
        if not self._cache.can_admit(num_tokens, hit, headroom):
            self._blocked = (request.arrival, self._cache.num_free_blocks)
            return None, 0
        if self._config.reserve is not None and self._config.reserve(request):
            self._refused = request.arrival
            return None, 0
        self._queue.pop()
        count = min(left, budget)
        slot = self._slots.admit(request, num_cached)
        self._cache.admit(slot, request, hit, num_cached + count)
        self._count(request, num_tokens, num_cached)
        request.status = RequestStatus.RUNNING
        return _describe(request, slot, num_cached), count

    def _count(self, request: Request, num_tokens: int, num_cached: int) -> None:
        self.num_cached_tokens += num_cached
        self.num_queried_tokens += num_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
            if self._config.enable_prefix_caching:
                self._watch.note(request, num_cached)
            self.num_prompt_tokens += request.prompt_len


def _name(request: Request) -> str:
    """The request as messages name it; nearly all of them need no message."""
    return f"request {request.req_id!r}"


def _describe(request: Request, slot: int, num_cached: int) -> NewRequest:
    assert request.seed is not None, "a request draws its seed when it is made"
    return NewRequest(
        req_id=request.req_id,
        slot=slot,
        prefill_token_ids=request.token_ids(),
        prompt_len=request.prompt_len,
        sampling_params=request.sampling_params,
        seed=request.seed,
        num_computed_tokens=num_cached,
        num_scored_tokens=request.num_scored_tokens,
        model_inputs=request.model_inputs,
        input_keys=request.input_keys,
    )
