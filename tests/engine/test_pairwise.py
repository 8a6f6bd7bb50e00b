"""Features break in pairs: each pair of them, on full attention and with windows, against the oracle."""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from support.drained import Drained
from support.phases import at_phases, pushing_out
from support.reference import assert_exact
from support.replays import replayed_steps
from support.whole_steps import ways_since

from core_runner import LLM, SamplingParams
from core_runner.request import Request

if TYPE_CHECKING:
    from conftest import TinyModel

    from core_runner import CompletionOutput, RequestOutput

FEATURES = ("chunked", "prefix", "preemption", "mixed", "async", "logprobs", "seeded", "abort", "graphs")
MAX_TOKENS = 8
_draw = random.Random(5)
SUBJECT, *NEIGHBOURS, VICTIM = [
    [_draw.randrange(3, 211) for _ in range(length)] for length in (19, 1, 30, 8, 21)
]
PLAIN = {
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "cuda_graphs": False,
}
OPTIONS = {
    "chunked": {"max_num_batched_tokens": 7},
    "prefix": {"enable_prefix_caching": True},
    "async": {"async_scheduling": True},
    "graphs": {"cuda_graphs": None},
}


def _params(pair: tuple[str, ...], index: int) -> SamplingParams:
    # In a mixed batch the neighbours differ from the subject in what they ask for.
    asks = {"logprobs", "seeded"}.intersection(pair) if index == 0 or "mixed" not in pair else set()
    return SamplingParams(
        temperature=0.8 if "seeded" in asks else 0.0,
        seed=77 + index,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=2 if "logprobs" in asks else None,
    )


class Matrix:
    """The engines and oracles of one model."""

    def __init__(self, model: TinyModel, drained: Drained) -> None:
        self.model, self.drained = model, drained
        self.engine = cache(self._engine)
        self.alone = cache(self._alone)

    def _engine(self, *features: str) -> LLM:
        options = dict(PLAIN)
        for feature in features:
            options |= OPTIONS[feature]
        with replayed_steps():
            return self.drained(
                self.model.directory, device="cpu", block_size=4, max_num_reqs=6, max_model_len=64, **options
            )

    def _alone(self, prompt: tuple[int, ...], params: SamplingParams) -> CompletionOutput:
        return self.engine().generate(list(prompt), params)[0].outputs[0]

    def run(self, pair: tuple[str, ...]) -> list[RequestOutput]:
        """Serve the prompts of a pair under both of its features, and see that they took part."""
        llm = self.engine(*[feature for feature in OPTIONS if feature in pair])
        prompts = [SUBJECT, *(NEIGHBOURS if "mixed" in pair else [])]
        params = [_params(pair, index) for index in range(len(prompts))]
        if "prefix" in pair:
            llm.generate(prompts, params)
        before = llm.stats().step_ways
        with ExitStack() as stack:
            pushed_out = stack.enter_context(pushing_out(llm.engine, 22)) if "preemption" in pair else [22]
            if "abort" in pair:
                stack.enter_context(at_phases(llm.engine, self._abort_later(llm)))
            outputs = llm.generate(prompts, params)
        assert pushed_out
        # Log-probabilities are computed behind a graph of the forward, everything else of these within the step's.
        scope = "forward graph" if "logprobs" in pair else "step graph"
        assert (ways_since(llm, before)[scope] > 0) == ("graphs" in pair)
        assert (outputs[0].num_cached_tokens > 0) == ("prefix" in pair)
        return outputs

    def _abort_later(self, llm: LLM):
        """Add one more request, and abort it in the fourth step while that is in flight."""
        llm.engine.add_request(Request("victim", VICTIM, _params((), 9)))
        phases = []

        def on_phase(phase: str) -> None:
            phases.append(phase)
            if phases.count("after execute_model") == 4 and phase == "after execute_model":
                assert llm.engine.abort("victim")

        return on_phase

    def check(self, pair: tuple[str, ...]) -> int:
        """Compare every result of a pair; returns the positions that could not be compared."""
        skipped = 0
        for index, output in enumerate(self.run(pair)):
            (got,), params = output.outputs, _params(pair, index)
            label = f"{' + '.join(pair)}, request {index}"
            if params.temperature == 0:
                reference = self.model.reference(output.prompt_token_ids, MAX_TOKENS)
                skipped += assert_exact(got, reference, label)
                continue
            want = self.alone(tuple(output.prompt_token_ids), params)
            assert got.token_ids == want.token_ids, label
            for ours, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
                assert {i: e.rank for i, e in ours.items()} == {i: e.rank for i, e in theirs.items()}, label
                assert [e.logprob for e in ours.values()] == pytest.approx(
                    [e.logprob for e in theirs.values()], abs=1e-4
                )
        return skipped


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_pair_is_exact(name: str, request: pytest.FixtureRequest, drained: Drained) -> None:
    matrix = Matrix(request.getfixturevalue(name), drained)
    skipped = sum(matrix.check(pair) for pair in combinations(FEATURES, 2))
    assert skipped <= MAX_TOKENS, f"{skipped} positions had too small a margin to compare"
