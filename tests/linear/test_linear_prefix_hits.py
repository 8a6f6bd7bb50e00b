"""Prefix hits, forks, evictions, preemption, and every pair of features, with recorded steps among them."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from engine.test_pairwise import FEATURES, MAX_TOKENS, OPTIONS, PLAIN, Matrix
from linear.states import pools
from support.drained import Drained
from support.phases import pushing_out
from support.reference import assert_exact
from support.replays import replayed_steps

from core_runner import LLM, SamplingParams

SIZES = {
    "device": "cpu",
    "block_size": 16,
    "max_num_reqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


def _prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 211) for _ in range(length)]


def _llm(drained: Drained, model, **options) -> LLM:
    return drained(model.directory, **{**SIZES, "model_options": {"state_block_size": 16}, **options})


def _run(llm: LLM, model, *prompts: list[int]) -> list[int]:
    """Cached tokens of each prompt."""
    outputs = llm.generate(list(prompts), GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(output.outputs[0], model.reference(prompt, GREEDY.max_tokens), f"{len(prompt)} tokens")
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "olmo_hybrid"])
def test_shared_prefixes_of_every_remainder(name: str, tiny, drained: Drained) -> None:
    model = tiny(name)
    llm = _llm(drained, model, num_blocks=120)
    for n, t in ((1, 0), (1, 1), (2, 7), (3, 15)):
        shared = _prompt(16 * n + t, seed=17 * n + t)
        # A fork at every length, then the first again.
        prompts = [[*shared, *_prompt(k, seed=k)] for k in (1, 2, 7)]
        hits = [_run(llm, model, prompt)[0] for prompt in [*prompts, prompts[0]]]
        assert hits == [0, 16 * n, 16 * n, (16 * n + t) // 16 * 16]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_hit_and_miss_are_equal_bits(name: str, tiny, drained: Drained) -> None:
    """Chunks end at the same places either way, so the same numbers are added in the same order."""
    llm = _llm(drained, tiny(name), num_blocks=60, max_num_batched_tokens=16)
    prompt = _prompt(40, seed=9)
    miss, hit = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 32)
    assert miss.outputs[0].logprobs == hit.outputs[0].logprobs


def test_evictions_lose_hits_and_nothing_else(tiny, drained: Drained) -> None:
    model = tiny("qwen3_5")
    llm = _llm(drained, model, num_blocks=14)
    draw, hits = random.Random(1), 0
    families = [_prompt(50, seed=seed) for seed in range(4)]
    for _ in range(8):
        prompts = [
            [
                *draw.choice(families)[: draw.randrange(5, 50)],
                *_prompt(draw.randrange(1, 9), draw.randrange(99)),
            ]
            for _ in range(3)
        ]
        hits += sum(cached > 0 for cached in _run(llm, model, *prompts))
    assert 2 < hits < 24
    assert not any(pool[0].any() for pool in pools(llm.engine.runner))


@pytest.mark.parametrize("name", ["lfm2_moe", "qwen3_5_moe"])
def test_preempted_requests_resume_from_their_states(name: str, tiny, drained: Drained) -> None:
    model = tiny(name)
    llm = _llm(drained, model, num_blocks=40)
    with pushing_out(llm.engine, 20) as pushed_out:
        _run(llm, model, *[_prompt(length, seed=length) for length in (33, 18, 47)])
    assert len(pushed_out) == 3


class LinearMatrix(Matrix):
    """The pairs on a model with states, one saved every 4 tokens."""

    def _engine(self, *features: str) -> LLM:
        options = dict(PLAIN)
        for feature in features:
            options |= OPTIONS[feature]
        sizes = {"block_size": 4, "max_num_reqs": 6, "max_model_len": 64, "num_blocks": 100}
        states = {"model_options": {"state_block_size": 4}}
        with replayed_steps():
            return self.drained(self.model.directory, device="cpu", **{**sizes, **states, **options})


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_every_pair_of_features_is_exact(name: str, tiny, drained: Drained) -> None:
    matrix = LinearMatrix(tiny(name), drained)
    skipped = sum(matrix.check(pair) for pair in combinations(FEATURES, 2))
    assert skipped <= MAX_TOKENS, f"{skipped} positions had too small a margin to compare"
