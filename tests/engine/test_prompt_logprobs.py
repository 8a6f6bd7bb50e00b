"""Log-probabilities of prompt tokens, whatever the cache, the chunks and the neighbours (field report A-04)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from conftest import TinyModel
from support.drained import Drained
from support.reference import LOGPROB_TOLERANCE

from core_runner import SamplingParams

if TYPE_CHECKING:
    from core_runner import LLM, RequestOutput

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48)
BLOCK_SIZE, UNBOUNDED = 16, 2048
PLAIN = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def _asking(num_best: int = 1, max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=num_best, logprobs=1
    )


def _prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 211) for _ in range(length)]


class Scores:
    """transformers' log-probabilities of every id after each prefix of a prompt, [prompt_len, vocab_size]."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._compute = lru_cache(None)(self._run)

    def __call__(self, prompt: Sequence[int]) -> torch.Tensor:
        return self._compute(tuple(prompt))

    @torch.no_grad()
    def _run(self, prompt: tuple[int, ...]) -> torch.Tensor:
        return torch.log_softmax(self._model(torch.tensor([prompt])).logits[0].float(), -1)

    def check(self, prompt: Sequence[int], output: RequestOutput, num_best: int = 1) -> None:
        """Every token but the first with the best ids, all as transformers has them."""
        entries, expected = output.prompt_logprobs, self(prompt)
        assert len(entries) == len(prompt)
        assert entries[0] is None
        for position in range(1, len(prompt)):
            entry, row, token = entries[position], expected[position - 1], prompt[position]
            assert num_best <= len(entry) <= num_best + 1
            for token_id, got in entry.items():
                assert abs(got.logprob - float(row[token_id])) < LOGPROB_TOLERANCE, f"position {position}"
            best = sorted((got.rank, got.logprob) for got in entry.values())[:num_best]
            assert [rank for rank, _ in best] == list(range(1, num_best + 1))
            torch.testing.assert_close(
                torch.tensor([value for _, value in best]), row.topk(num_best).values, rtol=0, atol=1e-4
            )
            # Ids as close as the tolerance may change places.
            least, most = (int((row > row[token] + off).sum()) + 1 for off in (1e-4, -1e-4))
            assert least <= entry[token].rank <= most


@pytest.fixture(scope="session")
def cohere2(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Scales its logits, and sees a window of 10 tokens in three of four layers."""
    return TinyModel("cohere2", tmp_path_factory.mktemp("cohere2"))


@contextmanager
def counting_logits(llm: LLM) -> Iterator[list[int]]:
    """The rows of each call of the LM head."""
    state, rows = llm.engine.runner.model_state, []
    compute_logits = state.compute_logits

    def counted(hidden_states: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_states))
        return compute_logits(hidden_states)

    with patch.object(state, "compute_logits", counted):
        yield rows


def _run_and_check(llm: LLM, scores: Scores, prompts: list[list[int]], *, beside: bool) -> None:
    """All prompts in one call, each beside one that asks for nothing if `beside`."""
    batch = [(prompt, _asking()) for prompt in prompts]
    if beside:
        batch = [item for pair in batch for item in (([*pair[0][:20], 7], PLAIN), pair)]
    outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    for (prompt, params), output in zip(batch, outputs, strict=True):
        if params is PLAIN:
            assert output.prompt_logprobs is None
        else:
            scores.check(prompt, output)
            assert len(output.outputs[0].token_ids) == 1


@pytest.mark.parametrize("budget", [4, 16, UNBOUNDED])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2"])
def test_cold_warm_and_shared_prefixes(
    name: str, budget: int, request: pytest.FixtureRequest, drained: Drained
) -> None:
    model: TinyModel = request.getfixturevalue(name)
    scores = Scores(model.model)
    llm = drained(
        model.directory, device="cpu", block_size=BLOCK_SIZE, max_num_reqs=4, max_num_batched_tokens=budget
    )
    prompts = [_prompt(length, seed=length) for length in LENGTHS]
    for beside in (False, False, True):
        _run_and_check(llm, scores, prompts, beside=beside)
    base = _prompt(48, seed=48)
    sharing = [[*base[:shared], *_prompt(9, seed=shared + i)] for shared in (16, 17, 32) for i in (0, 1)]
    random.Random(1).shuffle(sharing)
    _run_and_check(llm, scores, sharing, beside=True)


def test_asking_takes_no_hit_but_leaves_one(llama: TinyModel, drained: Drained) -> None:
    llm = drained(llama.directory, device="cpu", block_size=BLOCK_SIZE)
    prompt = _prompt(40, seed=5)
    hits = [
        llm.generate(prompt, params)[0].num_cached_tokens
        for params in (_asking(), _asking(), PLAIN, _asking())
    ]
    assert hits == [0, 0, 32, 0]


@pytest.mark.parametrize("num_best", [0, 3, 256])
def test_widths_differ_within_a_batch(num_best: int, llama: TinyModel, drained: Drained) -> None:
    llm = drained(llama.directory, device="cpu", block_size=BLOCK_SIZE, max_num_batched_tokens=24)
    scores, widths = Scores(llama.model), [num_best, 2, 0]
    prompts = [_prompt(20 + width % 7, seed=width) for width in widths]
    outputs = llm.generate(prompts, [_asking(width, max_tokens=4) for width in widths])
    for prompt, width, output in zip(prompts, widths, outputs, strict=True):
        # The vocabulary has 211 ids; asking for more gives all of them.
        scores.check(prompt, output, min(width, 211))
        assert len(output.outputs[0].logprobs) == 4


def test_chunks_that_nobody_wants_scored_never_run_the_head(llama: TinyModel, drained: Drained) -> None:
    llm = drained(llama.directory, device="cpu", max_num_batched_tokens=8, enable_prefix_caching=False)
    with counting_logits(llm) as rows:
        llm.generate([_prompt(40, seed=1), _prompt(21, seed=2)], PLAIN)
    assert sum(rows) == 2 * PLAIN.max_tokens
    with counting_logits(llm) as rows:
        llm.generate([_prompt(40, seed=1), _prompt(21, seed=2)], [PLAIN, _asking(max_tokens=3)])
    assert sum(rows) == 2 * PLAIN.max_tokens + 20


@contextmanager
def pushing_out_in_prefill(llm: LLM, points: Sequence[int]) -> Iterator[list[int]]:
    """Preempt each request once for each point, in the first step after it has computed so many tokens."""
    scheduler, schedule = llm.engine.scheduler, llm.engine.scheduler.schedule
    pushed_out: list[int] = []

    def push_out_first() -> Any:
        table = scheduler._slots
        for slot in table.running().tolist():
            request, computed = table.requests_np[slot], int(table.num_computed_np[slot])
            if request.num_preemptions < len(points) and computed >= points[request.num_preemptions]:
                pushed_out.append(computed)
                scheduler._preempt(request)
        return schedule()

    with patch.object(scheduler, "schedule", push_out_first):
        yield pushed_out


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_preemption_computes_each_position_once(
    prefix: bool, is_async: bool, llama: TinyModel, drained: Drained
) -> None:
    llm = drained(
        llama.directory,
        device="cpu",
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=7,
        enable_prefix_caching=prefix,
        async_scheduling=is_async,
    )
    scores = Scores(llama.model)
    for round_, points in enumerate([(1,), (16,), (17,), (31,), (39,), (40, 42), (3, 9, 20, 38)]):
        prompts = [_prompt(40, seed=100 + round_), _prompt(33, seed=200 + round_)]
        before = llm.stats().cached_tokens
        with counting_logits(llm) as rows, pushing_out_in_prefill(llm, points) as pushed_out:
            outputs = llm.generate(prompts, _asking(max_tokens=5))
        assert len(pushed_out) >= len(points)
        for prompt, output in zip(prompts, outputs, strict=True):
            scores.check(prompt, output)
        assert sum(rows) >= 39 + 32 + 2 * 5
        # One sample for each token; in flight, one may be taken in vain.
        assert sum(rows) <= 39 + 32 + 2 * 5 + is_async * len(pushed_out)
        if prefix and points[0] >= BLOCK_SIZE:
            assert llm.stats().cached_tokens > before, "what is scored already may be hit"


def test_end_of_a_stream_brings_them(llama: TinyModel, drained: Drained) -> None:
    llm = drained(llama.directory, device="cpu", max_num_batched_tokens=16)
    prompt = _prompt(33, seed=9)
    deltas = list(llm.stream(prompt, _asking(max_tokens=4)))
    assert [delta.output is not None for delta in deltas] == [False] * 3 + [True]
    Scores(llama.model).check(prompt, deltas[-1].output)
