"""`Scheduler`: which requests run in the next step, with how many tokens, in which slots and blocks.

The engine may be one step ahead: `schedule()` for step N+1 comes before `update()` of step N. The device
runs steps in order, so slots and blocks that are given up now may have a new owner in the next step although
a launched one still writes them: the new owner's writes come later. What must be known on the host first are
tokens: blocks are offered for prefix hits, and preempted requests return, only when each of them is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from core_runner.errors import RequestError
from core_runner.request import Request, RequestStatus
from core_runner.scheduling.admission import Admission, AdmissionRules
from core_runner.scheduling.builder import StepBuilder
from core_runner.scheduling.cache_manager import CacheManager
from core_runner.scheduling.output import (
    ModelRunnerOutput,
    NewRequest,
    RemovedRequest,
    RemoveReason,
    SchedulerOutput,
)
from core_runner.scheduling.plan import Rows, plan_running
from core_runner.scheduling.prefix_cache import GroupSpec
from core_runner.scheduling.queue import WaitingQueue
from core_runner.scheduling.slots import SlotTable
from core_runner.scheduling.steady import SteadySteps
from core_runner.scheduling.step import RequestUpdate, ScheduledStep, SchedulerConfig, SchedulerStats
from core_runner.scheduling.update import StepResults

__all__ = ["GroupSpec", "RequestUpdate", "ScheduledStep", "Scheduler", "SchedulerConfig", "SchedulerStats"]

_TURNS = 64  # steps in which the blocks of every running request are looked at once


class Scheduler:
    """Continuous batching over `max_num_reqs` slots and the block pools of the cache groups.

    groups, num_blocks: one entry per cache group (null block included). eos_token_ids: the model's end ids.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: Sequence[GroupSpec | tuple[int, int | None]],
        num_blocks: Sequence[int],
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.config = config
        self._eos = frozenset(eos_token_ids)
        self._slots = SlotTable(config.max_num_reqs)
        self._cache = CacheManager(
            [GroupSpec(*group) for group in groups],
            num_blocks,
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
            max_chunk=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            share_prompts=config.share_prompts,
        )
        self._queue = WaitingQueue(config.max_waiting)
        self._requests: dict[str, Request] = {}
        self._removed: list[RemovedRequest] = []
        self._results = StepResults(self._slots, eos_token_ids)
        self._rules = AdmissionRules(config, self._cache, self._eos)
        self._admission = Admission(config, self._slots, self._cache, self._queue)
        self._failed: list[RequestUpdate] = []
        self._builder = StepBuilder(config, self._slots, self._cache, self._queue)
        self._steady = SteadySteps(self._slots, self._cache, self._queue, self._admission)
        self._num_arrivals = self._num_preemptions = self._turn = 0

    # ---- requests

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` or `QueueFullError` before anything changes."""
        if request.approved_by is self:
            self._check_new(request)
        else:
            self.validate(request)
        self._queue.check_room(request.req_id)
        request.arrival = self._num_arrivals
        request.rank = (request.priority if self.config.policy == "priority" else 0, request.arrival)
        if not request.sampling_params.ignore_eos:
            request.stop_token_ids |= self._eos
        self._num_arrivals += 1
        self._requests[request.req_id] = request
        self._cache.join_group(request)
        self._queue.push(request)

    def validate(self, request: Request) -> None:
        """Set the request's longest total length, or raise the `RequestError` with which it can never be served."""
        self._check_new(request)
        request.max_total_len = self._rules.max_total_len(request)

    def _check_new(self, request: Request) -> None:
        if request.arrival >= 0 or request.req_id in self._requests:
            raise RequestError(
                f"request {request.req_id!r} was added before; give each request its own object and id"
            )

    @property
    def has_room(self) -> bool:
        """Whether the waiting queue takes one more request."""
        return self._queue.has_room

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue."""
        return len(self._queue)

    def abort(self, req_id: str) -> bool:
        """End a request now, wherever it stands. False if there is no such request (it may have ended)."""
        request = self._requests.get(req_id)
        if request is not None:
            self._end(request, RequestStatus.FINISHED_ABORT)
        return request is not None

    def finish(self, req_id: str, reason: str = "stop") -> bool:
        """End a request for a reason that only the engine sees, such as a stop string ("stop") or "error"."""
        request = self._requests.get(req_id)
        if request is not None:
            self._end(request, RequestStatus(reason))
        return request is not None

    def unfinished(self) -> list[Request]:
        """The requests that have not ended, in order of arrival."""
        return list(self._requests.values())

    def unfinished_ids(self) -> list[str]:
        """Names of the requests that have not ended, in order of arrival."""
        return list(self._requests)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    # ---- steps

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can run now.

        With requests unfinished, None means that a step in flight must be given to `update` first.
        """
        step = self._steady.next()
        if step is None:
            step = self._plan()
            self._steady.note(step)
        return step

    def _plan(self) -> ScheduledStep | None:
        num_preemptions = self._num_preemptions
        for request in self._queue.settle():
            self._fail_waiting(request)
        rows = plan_running(self._slots, self.config)
        if len(rows.slots):
            rows = self._secure_blocks(rows)
        new_requests: list[NewRequest] = []
        # Who gave way just now must not come back in the same step.
        if len(self._queue) and num_preemptions == self._num_preemptions:
            new_requests, slots, counts = self._admission.admit(
                self.config.max_num_batched_tokens - int(rows.counts.sum())
            )
            rows = rows.join(slots, counts) if new_requests else rows
        self._admission.tell()
        if not len(rows.slots):
            self._cache.take_updates()  # only entries of slots that were preempted just now
            return None
        return self._builder.build(rows, new_requests, self._take_removed())

    def update(self, step: ScheduledStep, output: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take in what a step sampled: one entry for each request that got tokens or ended."""
        # Ended only after every row was taken: their slots name rows of this step until then.
        updates, ended = self._results.apply(step, output)
        for request, status in ended:
            self._end(request, status)
        if self._cache.enable_prefix_caching:
            self._publish_in_turn()
        return updates

    def take_failed(self) -> list[RequestUpdate]:
        """Requests that ended with an error while they waited, since this was asked last."""
        failed, self._failed = self._failed, []
        return failed

    def flush(self) -> SchedulerOutput | None:
        """A step without rows that only reports removals, for an engine that goes idle; None without any."""
        if not self._removed:
            return None
        return SchedulerOutput.empty(len(self._cache.groups), self._take_removed(), is_trusted=True)

    def stats(self) -> SchedulerStats:
        """Counters; the free ones return to their first values when every request has ended."""
        return SchedulerStats(
            free_slots=self._slots.num_free,
            free_blocks=self._cache.num_free_blocks,
            running=self._slots.num_running,
            waiting=len(self._queue),
            prompt_tokens=self._admission.num_prompt_tokens,
            generated_tokens=self._results.num_generated_tokens,
            cached_tokens=self._admission.num_cached_tokens,
            queried_tokens=self._admission.num_queried_tokens,
            cached_blocks=self._cache.num_cached_blocks,
            preemptions=self._num_preemptions,
        )

    def check_integrity(self) -> None:
        """Recount slots, blocks and requests; for tests and idle moments."""
        self._slots.check_integrity()
        self._cache.check_integrity()
        assert len(self._requests) == self._slots.num_running + len(self._queue), "a request is lost"

    # ---- building a step

    def _secure_blocks(self, rows: Rows) -> Rows:
        """Cover every row's tokens with blocks; where they run out, requests of the last ranks give way."""
        table, slots = self._slots, rows.slots
        computed, num_drafts = table.num_computed_np[slots], self.config.num_draft_tokens
        # Drafts in flight may be rejected: a later token may count on the rest alone.
        sure = computed - num_drafts * table.num_in_flight_np[slots] if num_drafts else computed
        self._cache.give_back_unseen(slots, sure)
        # Nearly always there is enough, and one vectorised check serves all rows.
        targets = computed + rows.counts
        if self._cache.grow_ahead(slots, targets, table.max_total_np[slots] - 1):
            return rows
        running = table.running()
        victims = running[table.by_rank(running)].tolist()
        # Rows are served by rank and victims come from the other end: no row that was served gives way.
        for row in table.by_rank(slots).tolist():
            one = slice(row, row + 1)
            while table.is_running_np[slots[row]] and not self._cache.grow(slots[one], targets[one]):
                self._preempt(table.requests_np[victims.pop()])
        return rows.select(table.is_running_np[slots])

    # ---- giving up slots

    def _preempt(self, request: Request) -> None:
        self._publish(request)
        self._give_up(request, "preempted")
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        # Its rank puts it before everything that came later, so it is the next to come back.
        self._queue.push(request)

    def _end(self, request: Request, status: RequestStatus) -> None:
        del self._requests[request.req_id]
        is_running = request.status is RequestStatus.RUNNING
        # Blocks of a request that failed may hold NaN, and so may those it was given by a hit.
        if status is RequestStatus.FINISHED_ERROR:
            self._cache.forget(request)
        elif status is RequestStatus.FINISHED_ABORT and not (is_running and self._slots.has_sampled(request)):
            # No sample has shown that what it computed is finite, and none will.
            self._cache.forget_own(request)
        elif is_running:
            self._publish(request)
        if is_running:
            self._give_up(request, "aborted" if status is RequestStatus.FINISHED_ABORT else "finished")
        else:
            self._queue.discard(request)
        request.status = status
        group = request.group
        if group is not None and group.leader is request and not group.is_computed:
            group.leader = None
            self._queue.release(group)

    def _publish_in_turn(self) -> None:
        """Offer blocks of outputs, of a few requests in each step: hashing is spread, and not left to the end."""
        self._turn = (self._turn + 1) % _TURNS
        for slot in self._slots.running()[self._turn :: _TURNS].tolist():
            self._publish(self._slots.requests_np[slot])

    def _publish(self, request: Request) -> None:
        """Offer the blocks that the request's outputs filled; those of its prompt have been, when it was scheduled."""
        if not self._cache.is_cacheable(request):
            return
        table, slot = self._slots, request.slot
        # Not with the last known token: the next sample shows whether what is computed of it is finite.
        known, computed = int(table.num_known_np[slot]), int(table.num_computed_np[slot])
        self._cache.publish(slot, request, min(known - 1, computed))

    def _give_up(self, request: Request, reason: RemoveReason) -> None:
        slot = self._slots.release(request)
        self._cache.release(slot)
        self._removed.append(RemovedRequest(slot, reason))

    def _fail_waiting(self, request: Request) -> None:
        assert request.constraint is not None, "only a constraint fails before a request runs"
        request.error = request.constraint.error
        self._end(request, RequestStatus.FINISHED_ERROR)
        self._failed.append(RequestUpdate(request, [], "error"))

    def _take_removed(self) -> list[RemovedRequest]:
        removed, self._removed = self._removed, []
        return removed
