"""Field report C-02 for recurrent state: padded steps touch nobody's state, whatever the buffers hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from mamba.driver import Driver
from mamba.states import pools, watch_rows
from support.recurrent_exact import TinyRecurrent
from support.reference import assert_exact
from support.tiny_recurrent import retraced_reference
from support.whole_steps import fill_with_garbage

from core_runner import ModelRunner, RunnerConfig

NUM_SLOTS, STEPS = 8, 64
_draw = random.Random(2)
PROMPTS = {
    slot: [_draw.randrange(3, 211) for _ in range(_draw.randrange(1, 20))] for slot in range(NUM_SLOTS)
}


class _Tokens:
    """What `assert_exact` compares."""

    logprobs = None

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids


def make_runner(model: TinyRecurrent, **options: Any) -> ModelRunner:
    """Slots for eight requests of up to 96 tokens, states saved every 16."""
    return ModelRunner(
        RunnerConfig(
            model=model.directory,
            dtype="float32",
            max_num_reqs=NUM_SLOTS,
            max_model_len=96,
            block_size=16,
            num_blocks=NUM_SLOTS * 6 + 1,
            model_options={"state_block_size": 16},
            **options,
        )
    )


def check_padding_rows_touch_nobody(runner: ModelRunner, model: TinyRecurrent, num_rows: int) -> None:
    """64 steps of `num_rows` requests or one more, after a batch of all eight has left its values in every buffer.

    The first state row and the last one belong to somebody; slot 1 runs every other step, slot 2 never again.
    """
    driver = Driver(runner)
    driver.step(range(NUM_SLOTS), new=PROMPTS)
    fill_with_garbage(runner)
    watch_rows(runner)
    often = [NUM_SLOTS - 1, 0, *[3, 4, 5, 6][: num_rows - 3]]
    before = runner.graphs.counts["step graph"]
    for step in range(STEPS):
        driver.step([*often, 1] if step % 2 else often)
    assert runner.graphs.counts["step graph"] - before > STEPS - 4
    skipped = 0
    for slot, tokens in driver.tokens.items():
        want = retraced_reference(model.model, PROMPTS[slot], tokens)
        skipped += assert_exact(_Tokens(tokens), want, f"slot {slot}")
    assert skipped <= STEPS // 2, f"{skipped} positions had too small a margin to compare"
    assert not any(pool[0].any() for pool in pools(runner))
