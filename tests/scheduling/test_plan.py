"""How a step's tokens are shared among running requests, on a slot table filled by hand."""

from __future__ import annotations

import numpy as np
import pytest

from core_runner.request import Request
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.plan import plan_running
from core_runner.scheduling.slots import SlotTable
from core_runner.scheduling.step import SchedulerConfig


def table_of(rows):
    """One slot for each (tokens known, tokens computed, longest total, priority)."""
    table = SlotTable(8)
    for arrival, (known, computed, max_total_len, priority) in enumerate(rows):
        request = Request(f"r{arrival}", np.ones(min(known, 4), np.int32), SamplingParams())
        request.output_token_ids = [1] * (known - request.prompt_len)
        request.max_total_len, request.rank = max_total_len, (priority, arrival)
        slot = table.admit(request, computed)
        table.prefill_len_np[slot] = known if computed < known - 1 else computed
    return table


@pytest.mark.parametrize(
    ("rows", "budget", "num_drafts", "counts"),
    [
        ([(30, 0, 40, 0), (30, 5, 40, 0), (9, 8, 40, 0)], 40, 0, {2: 1, 0: 30, 1: 9}),
        ([(30, 0, 40, 0), (30, 5, 40, 0), (9, 8, 40, 0)], 20, 0, {2: 1, 0: 19}),
        ([(9, 8, 40, 0), (9, 8, 9, 0), (9, 8, 10, 0)], 20, 3, {0: 4, 2: 1}),
        ([(9, 8, 40, 2), (9, 8, 40, 1), (9, 8, 40, 0)], 2, 0, {2: 1, 1: 1}),
        ([(9, 8, 40, 2), (9, 8, 40, 1), (9, 8, 40, 0)], 9, 3, {2: 4, 1: 4}),
        ([], 9, 3, {}),
    ],
)
def test_plan(rows, budget, num_drafts, counts):
    config = SchedulerConfig(
        max_num_reqs=8, max_num_batched_tokens=budget, max_model_len=64, num_draft_tokens=num_drafts
    )
    plan = plan_running(table_of(rows), config)
    assert list(zip(plan.slots.tolist(), plan.counts.tolist(), strict=True)) == list(counts.items())
    assert plan.counts.sum() <= budget
    assert plan.slots.dtype == plan.counts.dtype == plan.drafts.dtype == np.int32
