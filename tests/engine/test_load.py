"""20,000 short requests through 256 slots with random aborts: nothing leaks, and nobody else's tokens change."""

from __future__ import annotations

from functools import partial
from typing import Any

from support.drained import Drained
from support.load import Load, make_work, memory_after, quiet

NUM_ROUNDS, ROUND = 4, 5_000


def test_many_requests_through_few_slots(toy_options: dict[str, Any], drained: Drained) -> None:
    llm = drained(**toy_options, poison=False, max_model_len=32, max_num_reqs=256, num_blocks=1_500)
    work = make_work(ROUND, 50)
    want = quiet(llm, work)
    load = Load(llm, work, want)
    memory = [memory_after(partial(load.run, seed)) for seed in range(NUM_ROUNDS)]
    assert (load.num_different, load.most_running) == (0, 256)
    assert load.num_aborted > 20 * NUM_ROUNDS
    assert llm.stats().cached_tokens > ROUND
    # One object kept for every request of a round would be 5,000.
    assert max(memory[1:]) - min(memory[1:]) < ROUND // 5, memory
