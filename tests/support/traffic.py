"""Requests that take each other's slots and blocks while a step is in flight (field report B-03)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from support.phases import PHASES, at_phases
from support.reference import Reference, assert_exact
from support.whole_steps import mixed_replays, ways_since

from core_runner import LLM, SamplingParams
from core_runner.request import Request, RequestStatus
from core_runner.scheduling.output import SchedulerOutput
from core_runner.scheduling.step import RequestUpdate

NUM_SLOTS = 4
NUM_EVENTS = 200
EOS = range(20, 29)
# name -> (blocks, end ids). With 20 four requests fit, with 11 they push each other out.
ROOMY, TIGHT = 20, 11
CASES = {
    "abort": (ROOMY, range(0)),
    "eos": (ROOMY, EOS),
    "preemption": (TIGHT, range(0)),
    "preemption and eos": (TIGHT, EOS),
}

# Of a prompt and the tokens that came after it: what greedy decoding takes in the place of each.
Retrace = Callable[[Sequence[int], Sequence[int]], Reference]


def sizes(block_size: int, num_blocks: int) -> dict[str, Any]:
    """Options of an engine for `Traffic`."""
    return {
        "block_size": block_size,
        "max_num_reqs": NUM_SLOTS,
        "max_num_batched_tokens": 6 * block_size,
        "num_blocks": num_blocks,
    }


class Traffic:
    """Keeps every slot busy; at a wanted phase it aborts one request and adds another that takes its place."""

    def __init__(self, llm: LLM, retrace: Retrace, num_blocks: int, eos: range) -> None:
        self.llm, self.engine, self.retrace, self.eos = llm, llm.engine, retrace, eos
        self.tight = num_blocks == TIGHT
        self.block_size = llm.engine.config.block_size
        self.draw = random.Random(num_blocks + len(eos))
        stem = self.draw.choices(range(1, 50), k=2 * self.block_size)
        self.stems = [stem, stem[: self.block_size], stem[-self.block_size // 2 :]]
        self.requests: dict[str, Request] = {}
        self.emitted: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.events: Counter[str] = Counter()
        self.preemptions = 0
        self.successors: list[tuple[Request, int]] = []  # newcomers, and the slot that was given up for them
        self.num_same_slot = 0

    def add(self) -> Request:
        tail = self.draw.choices(range(1, 50), k=self.draw.randint(1, self.block_size + 1))
        # Each crosses the edge of a block, some two.
        max_tokens = self.draw.randint(self.block_size + 1, 2 * self.block_size)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=not self.eos)
        req_id = f"request-{len(self.requests)}"
        request = Request(req_id, [*self.draw.choice(self.stems), *tail], params)
        self.engine.add_request(request)
        self.requests[req_id], self.emitted[req_id] = request, []
        return request

    def on_phase(self, phase: str) -> None:
        if phase == "after schedule":
            self._look_for_successors()
        event = self.events.total()
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
            while self.events.total() < NUM_EVENTS or self.engine.has_unfinished:
                busy = len(self.engine.scheduler.unfinished_ids())
                for _ in range(busy, NUM_SLOTS if self.events.total() < NUM_EVENTS else 0):
                    self.add()
                aborted_before = set(self.aborted)
                for update in self.engine.step():
                    self._take(update, aborted_before)

    def _take(self, update: RequestUpdate, aborted_before: set[str]) -> None:
        req_id = update.request.req_id
        assert req_id not in aborted_before, "an aborted request emitted"
        assert req_id not in self.reasons, "an ended request emitted"
        self.emitted[req_id] += update.new_token_ids
        if update.finish_reason is not None:
            self.reasons[req_id] = update.finish_reason

    def check_tokens(self) -> int:
        """Every request has the oracle's tokens up to its end; returns positions not compared, as `assert_exact`."""
        num_skipped = 0
        for req_id, tokens in self.emitted.items():
            request = self.requests[req_id]
            if tokens:
                reference = self.retrace(request.prompt_token_ids.tolist(), tokens)
                got = SimpleNamespace(token_ids=tokens, logprobs=None)
                num_skipped += assert_exact(got, reference, f"{req_id}, aborted: {req_id in self.aborted}")
            reason = "stop" if {*tokens[-1:]} & {*self.eos} else None
            if reason is None and len(tokens) == request.sampling_params.max_tokens:
                reason = "length"
            assert not {*tokens[:-1]} & {*self.eos}, f"{req_id} went past its end"
            assert self.reasons.get(req_id) == reason, req_id
            assert (reason is None) == (req_id in self.aborted), req_id
        return num_skipped


def check_replacing(traffic: Traffic, is_recorded: bool) -> int:
    """Run the traffic, and check that it was what it should be; returns positions that were not compared."""
    llm, tight = traffic.llm, traffic.tight
    before, mixed = llm.stats().step_ways, mixed_replays(llm)
    traffic.run()
    num_skipped = traffic.check_tokens()
    assert min(traffic.events[phase] for phase in PHASES) >= NUM_EVENTS // len(PHASES)
    assert traffic.num_same_slot > NUM_EVENTS // (4 if tight else 2), "newcomers take slots just given up"
    assert (llm.stats().preemptions > 20) == tight
    assert ("stop" in traffic.reasons.values()) == bool(traffic.eos)
    assert llm.stats().cached_tokens > 0
    replayed = (
        ways_since(llm, before)["step graph"] > NUM_EVENTS,
        mixed_replays(llm) - mixed > NUM_EVENTS // 2,
    )
    assert replayed == (is_recorded, is_recorded)
    return num_skipped


def check_one_further_step(llm: LLM, prompts: Sequence[list[int]], want: Sequence[list[int]]) -> None:
    """Two requests, of which the first ends by an end id, which the host learns late: its surplus tokens go nowhere,
    and its neighbour's all come.
    """
    num_rows: list[int] = []
    execute_model = llm.engine.runner.execute_model

    def counting(step: SchedulerOutput) -> None:
        num_rows.append(step.num_reqs)
        execute_model(step)

    ending, neighbour = want
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(ending) + 20),
        SamplingParams(temperature=0.0, max_tokens=len(neighbour), ignore_eos=True),
    ]
    with patch.object(llm.engine.runner, "execute_model", counting):
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert [output.token_ids for output in outputs] == [ending, neighbour]
    assert [output.finish_reason for output in outputs] == ["stop", "length"]
    assert num_rows.count(2) == len(ending) + llm.engine.config.async_scheduling
    assert num_rows.count(1) == len(neighbour) - num_rows.count(2)
