"""20,000 short requests through 256 slots with random aborts: nothing leaks, and nobody else's tokens change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drained import Drained
from support.load import Load, assert_near_tie, make_work, memory_after, quiet
from support.reference import MARGIN
from support.toy_model import ToyPlugin, save_toy

from core_runner import SamplingParams
from core_runner.sampling.kernels.noise import TARGET, gumbel_torch

NUM_ROUNDS, ROUND = 4, 5_000


def test_many_requests_through_few_slots(toy_options: dict[str, Any], drained: Drained) -> None:
    llm = drained(**toy_options, poison=False, max_model_len=32, max_num_reqs=256, num_blocks=1_500)
    work = make_work(ROUND, 50)
    want = quiet(llm, work)
    load = Load(llm, work, want)
    memory = [memory_after(partial(load.run, seed)) for seed in range(NUM_ROUNDS)]
    assert (load.different, load.most_running) == ([], 256)
    assert load.num_aborted > 20 * NUM_ROUNDS
    assert llm.stats().cached_tokens > ROUND
    # One object kept for every request of a round would be 5,000.
    assert max(memory[1:]) - min(memory[1:]) < ROUND // 5, memory


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_only_a_near_tie_may_turn(temperature: float, tmp_path: Path, drained: Drained) -> None:
    """The rule of this load's test on a GPU: id 9 is always taken, and id 8 misses it by less than the margin."""
    scores = torch.zeros(50)
    scores[9], scores[8], scores[7] = 30, 30 - MARGIN / 2, 30 - MARGIN * 2

    def logits(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What becomes `scores` when this seed's noise is added, of tokens whose positions are one further."""
        noise = gumbel_torch(torch.full_like(positions, 3), positions + 1, TARGET, 50)
        return scores - temperature * noise

    llm = drained(save_toy(tmp_path, 50), plugins=[ToyPlugin(logits)], device="cpu", block_size=4)
    work = [([5, 6, 7], SamplingParams(temperature=temperature, seed=3, max_tokens=6))]
    want = quiet(llm, work)
    assert want == [[9] * 6]
    for near in ([9, 9, 8, 1, 2, 3], [8], [9] * 5 + [8]):
        assert_near_tie(llm, work, want, 0, near)
    with pytest.raises(AssertionError, match="request 0: token 2 is 7, not 9"):
        assert_near_tie(llm, work, want, 0, [9, 9, 7, 9, 9, 9])
    for other_length in ([9] * 5, [9] * 7):
        with pytest.raises(AssertionError, match=f"request 0: {len(other_length)} tokens, not 6"):
            assert_near_tie(llm, work, want, 0, other_length)
