"""Many short requests through few slots, some given up at random, beside the same ones undisturbed."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.reference import MARGIN

from core_runner import LLM, SamplingParams
from core_runner.request import Request
from core_runner.sampling.kernels.noise import TARGET, gumbel_torch

Work = Sequence[tuple[list[int], SamplingParams]]


def make_work(num_requests: int, vocab_size: int, seed: int = 7) -> Work:
    """Prompts of 1 to 16 ids, half of which begin alike, and 1 to 12 ids out; every other one is sampled by seed."""
    draw = random.Random(seed)
    stems = [draw.choices(range(3, vocab_size), k=8) for _ in range(20)]
    work = []
    for number in range(num_requests):
        prompt = draw.choices(range(3, vocab_size), k=draw.randint(1, 8))
        if draw.random() < 0.5:
            prompt = draw.choice(stems) + prompt
        temperature = 0.8 * (number % 2)
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=draw.randint(1, 12))
        work.append((prompt, params))
    return work


def assert_near_tie(llm: LLM, work: Work, want: Sequence[list[int]], number: int, tokens: list[int]) -> None:
    """Where a request's tokens first differ from the wanted ones, neither is worse than the best by the margin.

    The request is served alone up to there, without prefix hits. What follows is not compared, as in `assert_exact`.
    """
    (prompt, params), expected = work[number], want[number]
    pairs = enumerate(zip(tokens, expected, strict=False))
    position = next((place for place, (one, other) in pairs if one != other), None)
    assert position is not None, f"request {number}: {len(tokens)} tokens, not {len(expected)}"
    lead = [*prompt, *expected[:position]]
    vocab_size = llm.engine.runner.model_state.vocab_size
    alone = SamplingParams(temperature=0.0, max_tokens=1, logprobs=vocab_size, cache_salt="alone")
    (row,) = llm.generate(lead, alone)[0].outputs[0].logprobs
    # A sampled request takes the best of these sums; of a greedy one they are the log-probabilities.
    noise = gumbel_torch(torch.tensor([params.seed]), torch.tensor([len(lead)]), TARGET, vocab_size)[
        0
    ].tolist()
    scores = {token: entry.logprob + params.temperature * noise[token] for token, entry in row.items()}
    below = {token: max(scores.values()) - scores[token] for token in (tokens[position], expected[position])}
    assert max(below.values()) < MARGIN, (
        f"request {number}: token {position} is {tokens[position]}, not {expected[position]} (below the best: {below})"
    )


def quiet(llm: LLM, work: Work) -> list[list[int]]:
    """Output ids of each request when nobody disturbs them."""
    outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work])
    return [output.outputs[0].token_ids for output in outputs]


class Load:
    """Feeds an engine with `work` in random order and gives some requests up: while they wait, run or are in flight."""

    def __init__(self, llm: LLM, work: Work, want: Sequence[list[int]]) -> None:
        self.engine, self.work, self.want = llm.engine, work, want
        self.num_aborted = self.most_running = 0
        self.different: list[tuple[int, list[int]]] = []  # requests by number, and what they got
        self._open: dict[str, tuple[int, Request]] = {}

    def run(self, seed: int, abort: float = 0.5) -> None:
        """One round; `abort`: chance of a step in which a request is given up."""
        draw = random.Random(seed)
        order = list(range(len(self.work)))
        draw.shuffle(order)
        room = 2 * self.engine.config.max_num_reqs
        while order or self._open:
            while order and len(self._open) < room:
                self._add(f"round {seed}, request {len(order)}", order.pop())
            if draw.random() < abort:
                self._abort(draw.choice(list(self._open)))
            for update in self.engine.step():
                if update.finish_reason is not None:
                    self._take(update.request)
            self.most_running = max(self.most_running, self.engine.scheduler.stats().running)
        self.engine.settle()

    def _add(self, req_id: str, number: int) -> None:
        request = Request(req_id, *self.work[number])
        self._open[req_id] = number, request
        self.engine.add_request(request)

    def _abort(self, req_id: str) -> None:
        assert self.engine.abort(req_id)
        number, request = self._open.pop(req_id)
        self._compare(number, request, len(request.output_token_ids))
        self.num_aborted += 1

    def _take(self, request: Request) -> None:
        number, _ = self._open.pop(request.req_id)
        self._compare(number, request, None)

    def _compare(self, number: int, request: Request, length: int | None) -> None:
        """length: of what is wanted, None for all of it."""
        if request.output_token_ids != self.want[number][:length]:
            self.different.append((number, list(request.output_token_ids)))


def memory_after(run: Callable[[], Any]) -> int:
    """Blocks of memory that Python holds after a round."""
    run()
    gc.collect()
    return sys.getallocatedblocks()
