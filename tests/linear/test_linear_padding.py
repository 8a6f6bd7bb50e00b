"""Steps padded to a graph's size touch nobody's state, and rows of any number give the same tokens."""

from __future__ import annotations

import random

import pytest
from linear.states import pools, watch_rows
from mamba.padded_steps import check_padding_rows_touch_nobody, make_runner
from support.drained import Drained
from support.reference import assert_wholly_exact
from support.replays import replayed_steps

from core_runner import SamplingParams

_draw = random.Random(2)
PROMPTS = [[_draw.randrange(3, 211) for _ in range(_draw.randrange(1, 20))] for _ in range(9)]
# Requests end one after the other, so that every number of rows runs.
PARAMS = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("num_rows", [3, 5, 6, 7])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "olmo_hybrid"])
def test_padding_rows_touch_nobody(name: str, num_rows: int, tiny) -> None:
    """Field report C-02."""
    model = tiny(name)
    with replayed_steps():
        runner = make_runner(model, device="cpu")
    check_padding_rows_touch_nobody(runner, model, num_rows)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "olmo_hybrid"])
def test_steps_of_every_number_of_rows(name: str, tiny, drained: Drained) -> None:
    model = tiny(name)
    with replayed_steps():
        llm = drained(
            model.directory,
            device="cpu",
            block_size=16,
            max_num_reqs=8,
            max_model_len=96,
            num_blocks=60,
            async_scheduling=False,
            model_options={"state_block_size": 16},
        )
    runner = llm.engine.runner
    before = runner.graphs.counts["step graph"]
    watch_rows(runner)
    for index, output in enumerate(llm.generate(PROMPTS, PARAMS)):
        want = model.reference(PROMPTS[index], PARAMS[index].max_tokens)
        assert_wholly_exact(output.outputs[0], want, f"request {index}")
    assert runner.graphs.counts["step graph"] - before > 20
    assert not any(pool[0].any() for pool in pools(runner))
