"""Steady decode: when nobody came, ended or gave way, the next step is the last one, one token further."""

from __future__ import annotations

import numpy as np

from core_runner.scheduling.admission import Admission
from core_runner.scheduling.cache_manager import CacheManager
from core_runner.scheduling.output import IntArray, SchedulerOutput
from core_runner.scheduling.queue import WaitingQueue
from core_runner.scheduling.slots import SlotTable
from core_runner.scheduling.step import ScheduledStep


class SteadySteps:
    """Repeats a plain step of all running requests, at the cost of a few additions.

    It serves until a slot is handed out or given up or somebody could have one, a row comes to its last token, or
    blocks run out. The tables are kept up to date, so whoever plans the next step finds nothing missing.
    """

    def __init__(
        self, table: SlotTable, cache: CacheManager, queue: WaitingQueue, admission: Admission
    ) -> None:
        self._table, self._cache, self._queue, self._admission = table, cache, queue, admission
        self._step: ScheduledStep | None = None
        self._computed: IntArray | None = None  # of the next step's rows, once there is one
        self._most_computed: IntArray = np.zeros(0, np.int32)
        self._steps_left = self._steps_covered = 0

    def note(self, step: ScheduledStep | None) -> None:
        """Take in what was planned anew."""
        self._step, self._computed = step, None

    def next(self) -> ScheduledStep | None:
        """The last step once more; None, with nothing changed, if something else is to be done."""
        step, table, queue = self._step, self._table, self._queue
        if step is None or not step.is_plain or step.num_changes != table.num_changes:
            return None
        if len(step.requests) < table.num_running or queue.has_unready:
            return None
        if len(queue) and table.num_free and not self._admission.is_stuck():
            return None
        slots = step.output.slots
        computed = self._begin(slots) if self._computed is None else self._computed
        if self._steps_left <= 0 or not self._secure_blocks(slots, computed):
            return None
        self._steps_left -= 1
        self._steps_covered -= 1
        table.num_computed_np[slots] = self._computed = computed + 1
        table.num_tokens_np[slots] += 1
        table.num_in_flight_np[slots] += 1
        return self._describe(step, computed)

    def _begin(self, slots: IntArray) -> IntArray:
        table = self._table
        computed: IntArray = table.num_computed_np[slots]
        max_total = table.max_total_np[slots]
        # The last token of a row is no plain one: it ends the request.
        self._steps_left = int((max_total - table.num_tokens_np[slots]).min()) - 1
        self._steps_covered = self._cache.num_steps_covered(slots, computed)
        self._most_computed = max_total - 1
        return computed

    def _secure_blocks(self, slots: IntArray, computed: IntArray) -> bool:
        if self._cache.has_windows:
            self._cache.give_back_unseen(slots, computed)
        if self._steps_covered <= 0:
            if not self._cache.grow_ahead(slots, computed + 1, self._most_computed):
                return False
            self._steps_covered = self._cache.num_steps_covered(slots, computed)
        return True

    def _describe(self, step: ScheduledStep, computed: IntArray) -> ScheduledStep:
        output = SchedulerOutput(
            removed=(),
            new_requests=(),
            block_updates=self._cache.take_updates(),
            slots=step.output.slots,
            num_scheduled_tokens=step.output.num_scheduled_tokens,
            num_computed_tokens=computed,
            is_trusted=True,
            is_repeat=True,
        )
        return ScheduledStep(
            output=output,
            requests=step.requests,
            outputs=step.outputs,
            samples=step.samples,
            generations=step.generations,
            constrained=step.constrained,
            num_changes=step.num_changes,
            is_plain=True,
            any_reports=step.any_reports,
        )
