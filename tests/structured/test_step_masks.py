"""`SchedulerOutput.grammar_bitmask` under a scheduler written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core_runner import (
    BlockUpdate,
    GrammarBitmask,
    ModelRunner,
    NewRequest,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    SchedulerOutputError,
)

GREEDY = SamplingParams(temperature=0.0)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _mask(slot: int, *allowed: int, position: int = 0) -> GrammarBitmask:
    words = np.zeros((1, 64), np.uint32)
    for token_id in allowed:
        words[0, token_id // 32] |= 1 << (token_id % 32)
    return GrammarBitmask(_ints(slot), _ints(position), words.view(np.int32))


def _first(bitmask: GrammarBitmask | None) -> SchedulerOutput:
    """Slot 3 prefills half of its prompt; slots 1 and 0 all of theirs, so they sample."""
    new = [NewRequest(f"r{s}", s, [5, 6, 7, 8], 4, GREEDY, 0) for s in (3, 1, 0)]
    blocks = BlockUpdate(_ints(3, 1, 0), _ints(0, 0, 0), _ints(1, 1, 1), _ints(1, 2, 3))
    return SchedulerOutput((), new, [blocks], _ints(3, 1, 0), _ints(2, 4, 4), _ints(0, 0, 0), None, bitmask)


def _second(bitmask: GrammarBitmask | None) -> SchedulerOutput:
    none = _ints()
    update = BlockUpdate(none, none, none, none)
    return SchedulerOutput((), (), [update], _ints(0, 3, 1), _ints(1, 2, 1), _ints(4, 2, 4), None, bitmask)


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(
        RunnerConfig(device="cpu", max_num_reqs=4, max_model_len=64, num_blocks=9, max_num_batched_tokens=16)
    )


def _sample(runner: ModelRunner, step: SchedulerOutput) -> Any:
    runner.execute_model(step)
    return runner.sample_tokens().get_output()


def test_masks_reach_their_slots_whatever_the_order(runner: ModelRunner) -> None:
    free = _sample(runner, _first(None)).sampled_token_ids[:, 0]
    runner.reset()
    got = _sample(runner, _first(_mask(0, 1234, 77))).sampled_token_ids[:, 0]
    assert got[2] in (77, 1234)
    assert got[1] == free[1]
    calls = []

    def words() -> np.ndarray:
        calls.append(1)
        return np.concatenate([_mask(0, 900).words, _mask(0, 11).words, _mask(0).words])

    step = _second(GrammarBitmask(_ints(1, 3, 0), _ints(0, 0, 0), words))
    runner.execute_model(step)
    assert not calls, "masks are filled while the model runs"
    output = runner.sample_tokens().get_output()
    assert calls == [1]
    assert output.sampled_token_ids[:, 0].tolist()[1:] == [11, 900]
    assert output.failed.tolist() == [True, False, False], "a mask that allows nothing fails its row alone"


@pytest.mark.parametrize(
    ("bitmask", "message"),
    [
        (_mask(3, 7), "slot 3 draws no sample 0"),
        (_mask(2, 7), "slot 2 draws no sample 0"),
        (_mask(1, 7, position=1), "slot 1 draws no sample 1"),
        (_mask(99, 7), "slot 99 draws no sample"),
        (_mask(-1, 7), "slot -1 draws no sample"),
        (GrammarBitmask(_ints(1, 1), _ints(0, 0), np.zeros((2, 64), np.int32)), "two masks for one sample"),
        (
            GrammarBitmask(_ints(1), _ints(0, 0), np.zeros((1, 64), np.int32)),
            "slots and positions have shapes",
        ),
        (GrammarBitmask(_ints(1), _ints(0), np.zeros((1, 63), np.int32)), "must be int32 of shape"),
        (GrammarBitmask(_ints(1), _ints(0), np.zeros((1, 64), np.int64)), "must be int32 of shape"),
    ],
)
def test_masks_that_fit_no_sample_are_refused_before_anything_changes(
    runner: ModelRunner, bitmask: GrammarBitmask, message: str
) -> None:
    with pytest.raises(SchedulerOutputError, match=message):
        runner.execute_model(_first(bitmask))
    assert runner.sample_tokens() is None
    assert _sample(runner, _first(_mask(0, 9))).sampled_token_ids[2, 0] == 9


def test_a_step_of_no_masks_is_plain(runner: ModelRunner) -> None:
    empty = GrammarBitmask(_ints(), _ints(), np.zeros((0, 64), np.int32))
    step = replace(_first(None), grammar_bitmask=empty)
    assert not _sample(runner, step).failed.any()
