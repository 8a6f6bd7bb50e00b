"""Aborts, ends and preemptions while a step is in flight, whose slot and blocks are wanted at once (report B-03)."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.drained import Drained
from support.phases import PHASES, at_phases
from support.replays import replayed_steps
from support.toy_model import ToyPlugin, ToyTable, save_toy
from support.whole_steps import mixed_replays, ways_since

from core_runner import LLM, SamplingParams
from core_runner.request import Request, RequestStatus
from core_runner.scheduling.output import SchedulerOutput

NUM_SLOTS = 4
NUM_EVENTS = 200
EOS = range(20, 29)
STEMS = [[7, 3, 11, 20, 6, 41, 8, 8], [7, 3, 11, 20], [1, 2]]


class Traffic:
    """Keeps every slot busy; at a wanted phase it aborts one request and adds another that takes its place."""

    def __init__(self, llm: LLM, table: ToyTable, seed: int, eos: range, tight: bool) -> None:
        self.engine, self.table, self.eos, self.tight = llm.engine, table, eos, tight
        self.preemptions = 0
        self.draw = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.emitted: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.events: Counter[str] = Counter()
        self.successors: list[tuple[Request, int]] = []  # newcomers, and the slot that was given up for them
        self.num_same_slot = 0

    def add(self) -> Request:
        prompt = [*self.draw.choice(STEMS), *self.draw.choices(range(1, 50), k=self.draw.randrange(1, 6))]
        max_tokens = self.draw.randrange(5, 9)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=not self.eos)
        req_id = f"request-{len(self.requests)}"
        request = Request(req_id, prompt, params)
        self.engine.add_request(request)
        self.requests[req_id], self.emitted[req_id] = request, []
        self.expected[req_id] = self.table.greedy(prompt, max_tokens, self.eos)
        return request

    def on_phase(self, phase: str) -> None:
        if phase == "after schedule":
            self._look_for_successors()
        event = sum(self.events.values())
        if event < NUM_EVENTS and phase == PHASES[event % len(PHASES)] and self._is_time():
            running = [r for r in self.requests.values() if r.status is RequestStatus.RUNNING]
            if len(running) >= (2 if self.tight else NUM_SLOTS):
                self._replace(self.draw.choice(running))
                self.events[phase] += 1

    def _is_time(self) -> bool:
        """Of a tight pool, the steps in which a request was pushed out are the interesting ones."""
        seen, self.preemptions = self.preemptions, self.engine.stats().preemptions
        return self.draw.random() < (0.6 if not self.tight or self.preemptions > seen else 0.1)

    def _replace(self, victim: Request) -> None:
        slot = victim.slot
        assert self.engine.abort(victim.req_id)
        assert not self.engine.abort(victim.req_id), "there is nothing left to abort"
        self.aborted.add(victim.req_id)
        self.successors.append((self.add(), slot))

    def _look_for_successors(self) -> None:
        for request, slot in self.successors:
            self.num_same_slot += request.slot == slot
        self.successors = [pair for pair in self.successors if pair[0].status is RequestStatus.WAITING]

    def run(self) -> None:
        with at_phases(self.engine, self.on_phase):
            while sum(self.events.values()) < NUM_EVENTS or self.engine.has_unfinished:
                busy = len(self.engine.scheduler.unfinished_ids())
                for _ in range(busy, NUM_SLOTS if sum(self.events.values()) < NUM_EVENTS else 0):
                    self.add()
                aborted_before = set(self.aborted)
                for update in self.engine.step():
                    self._take(update, aborted_before)

    def _take(self, update: Any, aborted_before: set[str]) -> None:
        req_id = update.request.req_id
        assert req_id not in aborted_before, "an aborted request emitted"
        assert req_id not in self.reasons, "an ended request emitted"
        self.emitted[req_id] += update.new_token_ids
        if update.finish_reason is not None:
            self.reasons[req_id] = update.finish_reason

    def check(self) -> None:
        for req_id, tokens in self.emitted.items():
            want = self.expected[req_id]
            if req_id in self.aborted:
                assert tokens == want[: len(tokens)], f"{req_id}, which was aborted"
            else:
                assert tokens == want, req_id
                assert self.reasons[req_id] == ("stop" if want[-1] in self.eos else "length")


SLOW = pytest.mark.slow
CASES = {
    "abort": (20, range(0), False),
    "eos": (20, EOS, False),
    "preemption": (11, range(0), False),
    "preemption and eos": (11, EOS, False),
    "abort, recorded": (20, range(0), True),
    "eos, recorded": pytest.param(20, EOS, True, marks=SLOW),
    "preemption, recorded": pytest.param(11, range(0), True, marks=SLOW),
    "preemption and eos, recorded": pytest.param(11, EOS, True, marks=SLOW),
}


@pytest.mark.parametrize(("num_blocks", "eos", "is_recorded"), CASES.values(), ids=list(CASES))
def test_replacing_a_request_at_every_phase(
    num_blocks: int, eos: range, is_recorded: bool, toy_table: ToyTable, tmp_path: Path, drained: Drained
) -> None:
    """With 20 blocks four requests fit, with 11 they push each other out: newcomers live on blocks just given up."""
    tight = num_blocks == 11
    with replayed_steps():
        llm = drained(
            save_toy(tmp_path, 50, eos_token_id=list(EOS)),
            plugins=[ToyPlugin(toy_table)],
            device="cpu",
            block_size=4,
            max_num_reqs=NUM_SLOTS,
            max_num_batched_tokens=24,
            num_blocks=num_blocks,
            cuda_graphs=None if is_recorded else False,
        )
    before, mixed = llm.stats().step_ways, mixed_replays(llm)
    traffic = Traffic(llm, toy_table, num_blocks + len(eos), eos, tight)
    traffic.run()
    traffic.check()
    assert min(traffic.events[phase] for phase in PHASES) >= NUM_EVENTS // len(PHASES)
    assert traffic.num_same_slot > NUM_EVENTS // (4 if tight else 2), "newcomers take slots just given up"
    assert (llm.stats().preemptions > 20) == tight
    assert ("stop" in traffic.reasons.values()) == bool(eos)
    assert llm.stats().cached_tokens > 0
    replayed = (
        ways_since(llm, before)["step graph"] > NUM_EVENTS,
        mixed_replays(llm) - mixed > NUM_EVENTS // 2,
    )
    assert replayed == (is_recorded, is_recorded)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_ended_is_computed_in_one_further_step_at_most(
    is_async: bool, toy_table: ToyTable, tmp_path: Path, drained: Drained
) -> None:
    """It ends by an end id, which the host learns late; its surplus tokens go nowhere and its neighbour's all come."""
    neighbour = [1, 2]
    prompts = ([7, 3, 11, last] for last in range(1, 50))
    prompt = next(p for p in prompts if 4 <= len(toy_table.greedy(p, 30, EOS)) < 12)
    want = toy_table.greedy(prompt, 30, EOS)
    llm = drained(
        save_toy(tmp_path, 50, eos_token_id=list(EOS)),
        plugins=[ToyPlugin(toy_table)],
        device="cpu",
        max_num_reqs=2,
        async_scheduling=is_async,
    )
    num_rows: list[int] = []
    execute_model = llm.engine.runner.execute_model

    def counting(step: SchedulerOutput) -> None:
        num_rows.append(step.num_reqs)
        execute_model(step)

    params = [
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    ]
    with patch.object(llm.engine.runner, "execute_model", counting):
        first, second = llm.generate([prompt, neighbour], params)
    assert first.outputs[0].token_ids == want
    assert second.outputs[0].token_ids == toy_table.greedy(neighbour, 40)
    assert num_rows.count(2) == len(want) + is_async
    assert num_rows.count(1) == 40 - num_rows.count(2)
