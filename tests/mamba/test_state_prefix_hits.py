"""Prefix hits of recurrent state: shared prefixes of 16 n + t tokens, forks, evictions and preemption."""

from __future__ import annotations

from itertools import combinations

import pytest
from engine.test_pairwise import FEATURES, MAX_TOKENS
from support.drained import Drained
from support.recurrent_hits import (
    RecurrentMatrix,
    check_equal_bits,
    check_evictions,
    check_preempted,
    check_remainders,
    check_tails,
    hits_llm,
    random_prompt,
)
from support.replays import replayed_steps
from support.tiny_recurrent import TINY

from core_runner import SamplingParams


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_shared_prefixes_of_every_remainder(name: str, tiny, drained: Drained) -> None:
    check_remainders(tiny(name), drained, [(n, t) for n in (1, 3) for t in (0, 1, 12, 15)])


@pytest.mark.parametrize("name", ["bamba", "mamba2", "jamba"])
def test_tails_that_look_like_decode_steps(name: str, tiny, drained: Drained) -> None:
    with replayed_steps():
        llm = hits_llm(drained, tiny(name), num_blocks=120, max_num_batched_tokens=16)
    check_tails(tiny(name), llm)


def test_hit_and_miss_are_equal_bits(tiny, drained: Drained) -> None:
    check_equal_bits(tiny("mamba2"), drained)


def test_evictions_lose_hits_and_nothing_else(tiny, drained: Drained) -> None:
    check_evictions(tiny("bamba"), drained, rounds=12)


@pytest.mark.parametrize("name", TINY)
def test_preempted_requests_resume_from_their_states(name: str, tiny, drained: Drained) -> None:
    check_preempted(tiny(name), drained)


def test_completions_of_one_prompt_share_its_states(tiny, drained: Drained) -> None:
    model = tiny("bamba")
    llm = hits_llm(drained, model, num_blocks=60, enable_prefix_caching=False)
    prompt = random_prompt(37, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=3)
    want = model.reference(prompt, 6)
    (output,) = llm.generate(prompt, params)
    assert [completion.token_ids for completion in output.outputs] == [want.token_ids] * 3
    assert llm.stats().cached_tokens == 2 * 32


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_every_pair_of_features_is_exact(name: str, tiny, drained: Drained) -> None:
    matrix = RecurrentMatrix(tiny(name), drained)
    skipped = sum(matrix.check(pair) for pair in combinations(FEATURES, 2))
    assert skipped <= MAX_TOKENS, f"{skipped} positions had too small a margin to compare"


def test_a_hit_rate_of_zero_is_told(tiny, drained: Drained, caplog: pytest.LogCaptureFixture) -> None:
    """States are saved every 64 tokens, and the prompts that repeat are shorter."""
    llm = hits_llm(drained, tiny("mamba2"), num_blocks=20, model_options={"state_block_size": 64})
    for _ in range(34):
        llm.generate(random_prompt(30, seed=1), SamplingParams(max_tokens=1))
    assert [r.getMessage() for r in caplog.records if "prefix cache" in r.getMessage()]
    stats = llm.stats()
    assert (stats.hit_rate, stats.cached_tokens) == (0.0, 0)
    assert stats.queried_tokens >= 34 * 30


def test_kept_states_are_counted_and_bounded(tiny, drained: Drained) -> None:
    """Eleven blocks: the two full ones of each of the last five prompts are kept, and those before them given up."""
    llm = hits_llm(drained, tiny("mamba2"), num_blocks=12)
    assert llm.stats().num_blocks == 11
    prompts, params = [random_prompt(33, seed=seed) for seed in range(20)], SamplingParams(max_tokens=1)
    for count, prompt in enumerate(prompts, start=1):
        llm.generate(prompt, params)
        assert llm.stats().cached_blocks == min(2 * count, 10)
    hits = [llm.generate(prompt, params)[0].num_cached_tokens for prompt in prompts[:-10:-1]]
    assert hits == [32] * 5 + [0] * 4
