"""How the token budget of a step is shared among running requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core_runner.scheduling.output import IntArray
from core_runner.scheduling.slots import SlotTable
from core_runner.scheduling.step import SchedulerConfig


class Rows(NamedTuple):
    """Rows of the step being built, each array [num_reqs]. counts: tokens of a row, drafts included."""

    slots: IntArray
    counts: IntArray
    drafts: IntArray

    def join(self, slots: IntArray, counts: IntArray) -> Rows:
        """These rows and further ones without drafts."""
        pairs = ((self.slots, slots), (self.counts, counts), (self.drafts, np.zeros(len(slots), np.int32)))
        return Rows(*(np.concatenate(pair) for pair in pairs))

    def select(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Rows:
        """Some of these rows, by mask or index."""
        return Rows(self.slots[rows], self.counts[rows], self.drafts[rows])


def plan_running(table: SlotTable, config: SchedulerConfig) -> Rows:
    """Decode rows first, then prefill chunks in order of admission, within `max_num_batched_tokens`."""
    running = table.running()
    is_decoding = table.num_computed_np[running] >= table.prefill_len_np[running]
    rows = _decode_rows(table, config, running[is_decoding])
    return rows if is_decoding.all() else _add_chunks(table, config, rows, running[~is_decoding])


def _decode_rows(table: SlotTable, config: SchedulerConfig, decoding: IntArray) -> Rows:
    num_drafts, budget = config.num_draft_tokens, config.max_num_batched_tokens
    # What a constrained request may sample next depends on the token in flight: it sits this step out.
    if table.is_constrained_np.any():
        decoding = decoding[~table.is_constrained_np[decoding] | (table.num_in_flight_np[decoding] == 0)]
    # Tokens in flight count as had: a request at its limit only waits for them.
    room = table.max_total_np[decoding] - table.num_tokens_np[decoding]
    slots, room = decoding[room > 0], room[room > 0]
    drafts = np.minimum(room - 1, num_drafts).astype(np.int32, copy=False)
    rows = Rows(slots, drafts + np.int32(1), drafts)
    if len(slots) * (1 + num_drafts) <= budget:
        return rows
    # More rows than tokens: the first in rank go on, so that they end and make room.
    order = table.by_rank(slots)
    return rows.select(order[np.cumsum(rows.counts[order]) <= budget])


def _add_chunks(table: SlotTable, config: SchedulerConfig, rows: Rows, prefilling: IntArray) -> Rows:
    # What a chunk may take is what the chunks before it have left over.
    left = table.prefill_len_np[prefilling] - table.num_computed_np[prefilling]
    budget_left = config.max_num_batched_tokens - int(rows.counts.sum()) - (np.cumsum(left) - left)
    chunks = np.minimum(left, budget_left).astype(np.int32)
    return rows.join(prefilling[chunks > 0], chunks[chunks > 0])
