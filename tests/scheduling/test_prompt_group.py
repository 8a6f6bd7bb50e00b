"""Requests of one prompt in the scheduler: one leads, the others wait outside the line."""

from __future__ import annotations

import numpy as np
import pytest

from core_runner import SamplingParams
from core_runner.request import Request
from core_runner.scheduling.output import ModelRunnerOutput
from core_runner.scheduling.prompt_group import PromptGroup
from core_runner.scheduling.scheduler import ScheduledStep, Scheduler, SchedulerConfig

PROMPT = list(range(3, 43))
PARAMS = SamplingParams(max_tokens=3)


def _scheduler(**settings):
    options = {"max_num_reqs": 8, "max_num_batched_tokens": 16, "max_model_len": 128, **settings}
    return Scheduler(SchedulerConfig(**options), [(16, None)], [40])


def _add_group(scheduler, size=3):
    group = PromptGroup("p", size)
    requests = [Request(f"p.{i}", PROMPT, PARAMS, i, group=group, index=i) for i in range(size)]
    for request in requests:
        scheduler.add_request(request)
    return requests


def _run(scheduler) -> dict[str, int]:
    """One step; gives the tokens of each request in it."""
    step: ScheduledStep = scheduler.schedule()
    num_sampled = step.samples.astype(np.int32)
    ids, none = np.full((len(num_sampled), 1), 5, np.int32), np.zeros(len(num_sampled), np.int32)
    scheduler.update(step, ModelRunnerOutput(ids, num_sampled, none, none.astype(bool)))
    scheduler.check_integrity()
    names = [request.req_id for request in step.requests]
    return dict(zip(names, step.output.num_scheduled_tokens.tolist(), strict=True))


@pytest.mark.parametrize("prefix", [False, True])
def test_others_pass_those_who_wait(prefix):
    scheduler = _scheduler(enable_prefix_caching=prefix)
    _add_group(scheduler)
    scheduler.add_request(Request("other", [1, 2, 3], PARAMS, 0))
    assert scheduler.stats().waiting == 4
    assert _run(scheduler) == {"p.0": 16}
    assert _run(scheduler) == {"p.0": 16}
    # The end of the prompt leaves room, which the next one in the line gets.
    assert _run(scheduler) == {"p.0": 8, "other": 3}
    # 40 tokens are two full blocks, which both of the others hit, and eight tokens.
    assert _run(scheduler) == {"p.0": 1, "other": 1, "p.1": 8, "p.2": 6}
    assert scheduler.stats().cached_tokens == 64


def test_the_next_one_leads_when_the_first_is_aborted():
    scheduler = _scheduler()
    requests = _add_group(scheduler)
    assert _run(scheduler) == {"p.0": 16}
    assert scheduler.abort("p.0")
    # No sample has shown that what the first one computed is finite, so it is not hit.
    assert [_run(scheduler) for _ in range(3)] == [{"p.1": 16}, {"p.1": 16}, {"p.1": 8}]
    assert _run(scheduler) == {"p.1": 1, "p.2": 8}
    assert [request.num_cached_tokens for request in requests] == [0, 0, 32]


def test_one_that_is_aborted_while_it_waits_does_not_come_back():
    scheduler = _scheduler(max_waiting=3)
    _add_group(scheduler)
    assert not scheduler.has_room
    assert scheduler.abort("p.1")
    assert scheduler.has_room
    for _ in range(3):
        assert list(_run(scheduler)) == ["p.0"]
    assert _run(scheduler) == {"p.0": 1, "p.2": 8}


def test_a_whole_group_that_is_aborted_leaves_nothing():
    scheduler = _scheduler()
    free = scheduler.stats()
    for request in _add_group(scheduler):
        scheduler.abort(request.req_id)
    assert scheduler.schedule() is None
    assert scheduler.stats() == free
    assert not scheduler.has_unfinished


def test_nobody_waits_where_blocks_cannot_be_shared():
    scheduler = _scheduler(enable_prefix_caching=False, share_prompts=False, max_num_batched_tokens=90)
    _add_group(scheduler)
    assert _run(scheduler) == {"p.0": 40, "p.1": 40, "p.2": 10}
    assert scheduler.stats().cached_tokens == 0


def test_salts_of_groups_differ():
    assert PromptGroup("p", 2).salt != PromptGroup("p", 2).salt
