"""Steps padded to a graph's size touch nobody's state (field report C-02), replayed on a CPU by `support.replays`."""

from __future__ import annotations

import random

import pytest
from mamba.driver import Driver
from mamba.states import pools, watch_rows
from support.reference import assert_exact
from support.replays import replayed_steps

from core_runner import ModelRunner, RunnerConfig

NUM_SLOTS, STEPS = 8, 64
_draw = random.Random(2)
PROMPTS = {
    slot: [_draw.randrange(3, 211) for _ in range(_draw.randrange(1, 20))] for slot in range(NUM_SLOTS)
}


class _Tokens:
    logprobs = None

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


@pytest.fixture(params=["bamba", "mamba"])
def driver(request, tiny):
    """A runner that records steps, and a first batch of all slots, which leaves its values in every buffer."""
    model = tiny(request.param)
    config = RunnerConfig(
        model=model.directory,
        device="cpu",
        max_num_reqs=NUM_SLOTS,
        max_model_len=96,
        block_size=16,
        num_blocks=NUM_SLOTS * 6 + 1,
        model_options={"state_block_size": 16},
    )
    with replayed_steps():
        runner = ModelRunner(config)
    runner.model = model
    return Driver(runner)


@pytest.mark.parametrize("num_rows", [3, 5, 6, 7])
def test_padding_rows_touch_nobody(num_rows: int, driver: Driver) -> None:
    runner = driver.runner
    driver.step(range(NUM_SLOTS), new=PROMPTS)
    watch_rows(runner)
    # The first state row and the last one belong to somebody; slot 1 runs every other step, slot 2 never again.
    often = [NUM_SLOTS - 1, 0, *[3, 4, 5, 6][: num_rows - 3]]
    for step in range(STEPS):
        driver.step([*often, 1] if step % 2 else often)
    replays = runner.graphs.counts["step graph"]
    assert replays > STEPS - 4
    for slot, tokens in driver.tokens.items():
        got = tokens[:24]
        want = runner.model.reference(PROMPTS[slot], len(got))
        assert_exact(_Tokens(got), want, f"slot {slot}")
    assert not any(pool[0].any() for pool in pools(runner))
