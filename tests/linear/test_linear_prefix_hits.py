"""Prefix hits, forks, evictions, preemption, and every pair of features, with recorded steps among them."""

from __future__ import annotations

from itertools import combinations

import pytest
from engine.test_pairwise import FEATURES, MAX_TOKENS
from linear.tiny import TINY
from support.drained import Drained
from support.recurrent_hits import (
    RecurrentMatrix,
    check_equal_bits,
    check_evictions,
    check_preempted,
    check_remainders,
    check_tails,
    hits_llm,
)
from support.replays import replayed_steps


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "olmo_hybrid"])
def test_shared_prefixes_of_every_remainder(name: str, tiny, drained: Drained) -> None:
    check_remainders(tiny(name), drained, [(1, 0), (1, 1), (2, 7), (3, 15)])


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_tails_that_look_like_decode_steps(name: str, tiny, drained: Drained) -> None:
    """Field report C-03."""
    with replayed_steps():
        llm = hits_llm(drained, tiny(name), num_blocks=120, max_num_batched_tokens=16)
    check_tails(tiny(name), llm)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_hit_and_miss_are_equal_bits(name: str, tiny, drained: Drained) -> None:
    check_equal_bits(tiny(name), drained)


def test_evictions_lose_hits_and_nothing_else(tiny, drained: Drained) -> None:
    check_evictions(tiny("qwen3_5"), drained, rounds=8)


@pytest.mark.parametrize("name", TINY)
def test_preempted_requests_resume_from_their_states(name: str, tiny, drained: Drained) -> None:
    check_preempted(tiny(name), drained)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_every_pair_of_features_is_exact(name: str, tiny, drained: Drained) -> None:
    matrix = RecurrentMatrix(tiny(name), drained)
    skipped = sum(matrix.check(pair) for pair in combinations(FEATURES, 2))
    assert skipped <= MAX_TOKENS, f"{skipped} positions had too small a margin to compare"
