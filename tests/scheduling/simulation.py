"""A small engine around a scheduler and the simulated device, with checks after every micro-phase."""

from __future__ import annotations

from collections import deque

import numpy as np
from simulated_device import EOS, VOCAB_SIZE, SimulatedDevice, reference

from core_runner.request import Request
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.scheduler import Scheduler, SchedulerConfig


class Simulation:
    """`depth` steps are launched before the first of them is read: 0 is synchronous, 1 the asynchronous engine."""

    def __init__(
        self,
        *,
        groups=((16, None),),
        num_blocks=(64,),
        seqs=8,
        budget=256,
        length=256,
        depth=0,
        prefix=True,
        seed=0,
        **config,
    ):
        config = SchedulerConfig(
            max_num_reqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=length,
            enable_prefix_caching=prefix,
            **config,
        )
        self.scheduler = Scheduler(config, groups, num_blocks, eos_token_ids=[EOS])
        self.device = SimulatedDevice(
            groups,
            num_blocks,
            max_num_reqs=seqs,
            budget=budget,
            max_model_len=length,
            num_draft_tokens=config.num_draft_tokens,
            seed=seed,
        )
        self.depth = depth
        self.at_start = self.free_counts()
        self.requests: dict[str, Request] = {}
        self.emitted: dict[str, list[int]] = {}
        self.num_logprobs: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.ended_by_caller: set[str] = set()
        self.num_steps = 0
        self._in_flight: deque = deque()

    def free_counts(self):
        stats = self.scheduler.stats()
        return stats.free_slots, stats.free_blocks, stats.running, stats.waiting

    def add(self, req_id, prompt, **params) -> Request:
        params.setdefault("max_tokens", 8)
        request = Request(req_id, np.asarray(prompt, np.int32), SamplingParams(**params))
        self.scheduler.add_request(request)
        self.requests[req_id], self.emitted[req_id], self.num_logprobs[req_id] = request, [], 0
        return request

    def abort(self, req_id) -> bool:
        done = self.scheduler.abort(req_id)
        assert done == (req_id not in self.finished and req_id not in self.ended_by_caller)
        if done:
            self.ended_by_caller.add(req_id)
            assert self.requests[req_id].finish_reason == "abort"
        return done

    @property
    def is_busy(self):
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self, between=lambda phase: None):
        """One engine step; `between` is called at each micro-phase and may add or abort requests."""
        between("before schedule")
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is None and not self._in_flight:
            assert not self.scheduler.has_unfinished, "stuck: nothing runs and nothing is left to read"
        between("scheduled")
        if step is not None:
            self._in_flight.append((step, self.device.execute(step.output)))
            self.num_steps += 1
        between("launched")
        if self._in_flight and (step is None or len(self._in_flight) > self.depth):
            self._take(self.scheduler.update(*self._in_flight.popleft()))
        self.scheduler.check_integrity()

    def _take(self, updates):
        for update in updates:
            req_id = update.request.req_id
            assert req_id not in self.finished, f"{req_id} emits after its end"
            assert req_id not in self.ended_by_caller, f"{req_id} emits after its abort"
            self.emitted[req_id] += update.new_token_ids
            self.num_logprobs[req_id] += len(update.new_logprobs)
            if update.finish_reason is not None:
                self.finished[req_id] = update.finish_reason

    def run(self, between=lambda phase: None, max_steps=20_000):
        """Step until everything has ended, then check that it is as it was at the start."""
        while self.is_busy:
            self.step(between)
            assert self.num_steps < max_steps, "no end in sight"
        self.check_drained()

    def check_drained(self):
        output = self.scheduler.flush()
        if output is not None:
            self.device.execute(output)
        assert self.scheduler.flush() is None
        self.scheduler.check_integrity()
        assert self.free_counts() == self.at_start
        assert not self.device.rows, "a slot was never reported as removed"
        assert set(self.finished) | self.ended_by_caller == set(self.requests)

    def check_exact(self):
        """Every stream is what the request alone gives; an aborted one is a prefix of it."""
        for req_id, request in self.requests.items():
            params = request.sampling_params
            stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
            tokens, reason = reference(
                request.prompt_token_ids, params.cache_salt, request.max_total_len, stop_ids
            )
            emitted = self.emitted[req_id]
            assert request.output_token_ids == emitted
            if params.logprobs is not None:
                assert self.num_logprobs[req_id] == len(request.logprobs) == len(emitted)
                assert [int(row.token_ids[0]) for row in request.logprobs] == emitted
            if req_id in self.ended_by_caller:
                assert emitted == tokens[: len(emitted)]
            else:
                assert (emitted, self.finished[req_id]) == (tokens, reason), req_id
                assert request.finish_reason == reason


def prompt(rng, length):
    """Random token ids that are not the end id."""
    return rng.integers(1, VOCAB_SIZE, length).tolist()
