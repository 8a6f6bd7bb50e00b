"""From the rows that were chosen to the step that the runner gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core_runner.request import Request
from core_runner.scheduling.cache_manager import CacheManager
from core_runner.scheduling.output import IntArray, NewRequest, RemovedRequest, SchedulerOutput
from core_runner.scheduling.plan import Rows
from core_runner.scheduling.queue import WaitingQueue
from core_runner.scheduling.slots import SlotTable
from core_runner.scheduling.step import ScheduledStep, SchedulerConfig


class StepBuilder:
    """Counts a step as done, offers the blocks of prefill tokens that it computes, and describes it."""

    def __init__(
        self, config: SchedulerConfig, slots: SlotTable, cache: CacheManager, queue: WaitingQueue
    ) -> None:
        self._num_drafts, self._slots, self._cache, self._queue = config.num_draft_tokens, slots, cache, queue

    def build(
        self, rows: Rows, new_requests: Sequence[NewRequest], removed: Sequence[RemovedRequest]
    ) -> ScheduledStep:
        """The step of these rows, whose blocks are secured."""
        table = self._slots
        slots, counts, drafts = rows
        computed, prefill_len = table.num_computed_np[slots], table.prefill_len_np[slots]
        after = computed + counts
        samples = after >= prefill_len
        table.num_computed_np[slots] = after
        table.num_tokens_np[slots] += np.where(samples, 1 + drafts, 0).astype(np.int32, copy=False)
        table.num_in_flight_np[slots] += samples
        requests = table.requests_np[slots].tolist()
        prefilling = np.flatnonzero(computed < prefill_len)
        if len(prefilling):
            self._note_prefills(prefilling, slots, requests, after)
        output = SchedulerOutput(
            removed=removed,
            new_requests=new_requests,
            block_updates=self._cache.take_updates(),
            slots=slots,
            num_scheduled_tokens=counts,
            num_computed_tokens=computed,
            num_draft_tokens=drafts if self._num_drafts else None,
            is_trusted=True,
        )
        return ScheduledStep(
            output=output,
            requests=requests,
            outputs=[request.output_token_ids for request in requests],
            samples=samples,
            generations=table.generation_np[slots],
            constrained=np.flatnonzero(samples & table.is_constrained_np[slots]),
            num_changes=table.num_changes,
            is_plain=not len(prefilling) and self._is_plain(rows),
            any_reports=bool(table.reports_np[slots].any()),
        )

    def _is_plain(self, rows: Rows) -> bool:
        """Whether every row, of those that decode, brings one token that is neither its last nor to be looked at."""
        table, slots = self._slots, rows.slots
        if self._num_drafts or table.needs_check_np[slots].any():
            return False
        return bool((table.num_tokens_np[slots] < table.max_total_np[slots]).all())

    def _note_prefills(
        self, rows: npt.NDArray[np.intp], slots: IntArray, requests: Sequence[Request], after: IntArray
    ) -> None:
        """Offer the blocks of prefill rows, and have those go on who have been waiting for these tokens."""
        # Offered only now: a hit within this step would read what this step is still to write.
        for row in rows[self._cache.has_unpublished(slots[rows], after[rows])].tolist():
            self._cache.publish(int(slots[row]), requests[row], int(after[row]))
        for row in rows.tolist():
            request = requests[row]
            if request.group is not None or request.sampling_params.prompt_logprobs is not None:
                self._note_prefill(request, int(after[row]))

    def _note_prefill(self, request: Request, num_computed: int) -> None:
        """What has been waiting for these tokens: prompt log-probabilities, and other completions of the prompt."""
        request.num_scored_tokens = max(request.num_scored_tokens, num_computed)
        group = request.group
        if group is not None and not group.is_computed and num_computed >= request.prompt_len:
            group.is_computed = True
            self._queue.release(group)
