"""`ModelRunner` under a scheduler written by hand: the public door for engine builders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.toy_model import ToyTable

from core_runner import (
    BlockUpdate,
    ModelRunner,
    NewRequest,
    RemovedRequest,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    SchedulerOutputError,
)
from model_states import PluginManager

PROMPTS = [[5, 6, 7, 8, 9, 10], [4], [9, 8, 7]]
MAX_TOKENS = 7
BLOCKS_EACH = 4  # of 4 tokens
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _new(index: int, **changes: Any) -> NewRequest:
    values = {
        "req_id": f"r{index}", "slot": index, "prefill_token_ids": PROMPTS[index],
        "prompt_len": len(PROMPTS[index]), "sampling_params": GREEDY, "seed": 0, **changes,
    }  # fmt: skip
    return NewRequest(**values)


def _blocks(*slots: int) -> BlockUpdate:
    """Slot s gets all its blocks at once: 4 s + 1 to 4 s + 4."""
    ids = [BLOCKS_EACH * slot + 1 + i for slot in slots for i in range(BLOCKS_EACH)]
    return BlockUpdate(
        _ints(*slots), _ints(*[0] * len(slots)), _ints(*[BLOCKS_EACH] * len(slots)), _ints(*ids)
    )


def _step(
    rows: dict[int, tuple[int, int]],
    new: tuple[NewRequest, ...] = (),
    removed: tuple[RemovedRequest, ...] = (),
    blocks: BlockUpdate | None = None,
) -> SchedulerOutput:
    """rows: slot -> (tokens computed before, tokens scheduled)."""
    computed, scheduled = zip(*rows.values(), strict=True) if rows else ((), ())
    update = blocks if blocks is not None else _blocks(*[request.slot for request in new])
    return SchedulerOutput(removed, new, [update], _ints(*rows), _ints(*scheduled), _ints(*computed))


class OwnScheduler:
    """Admits everything in the first step, prefills 2 tokens at a time, then decodes."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.computed = dict.fromkeys(range(len(PROMPTS)), 0)
        self.tokens: dict[int, list[int]] = {slot: [] for slot in self.computed}

    def step(self) -> None:
        first = not any(self.computed.values())
        rows = {slot: (done, self._count(slot)) for slot, done in self.computed.items()}
        new = tuple(_new(slot) for slot in self.computed) if first else ()
        self.runner.execute_model(_step(rows, new))
        self.take(rows)

    def take(self, rows: dict[int, tuple[int, int]]) -> None:
        output = self.runner.sample_tokens().get_output()
        assert not output.failed.any()
        for row, (slot, (done, count)) in enumerate(rows.items()):
            self.computed[slot] = done + count
            samples = done + count >= len(PROMPTS[slot])
            assert output.num_sampled[row] == samples
            self.tokens[slot] += output.sampled_token_ids[row, : output.num_sampled[row]].tolist()

    def _count(self, slot: int) -> int:
        return max(1, min(2, len(PROMPTS[slot]) - self.computed[slot]))

    @property
    def is_done(self) -> bool:
        return min(map(len, self.tokens.values())) >= MAX_TOKENS


@pytest.fixture
def runner(toy_options: dict[str, Any]) -> ModelRunner:
    options = {name: value for name, value in toy_options.items() if name != "plugins"}
    config = RunnerConfig(
        **options, max_num_reqs=4, max_num_batched_tokens=8, max_model_len=16, num_blocks=17, poison=True
    )
    return ModelRunner(config, plugins=PluginManager(plugins=toy_options["plugins"]))


def _run_to_end(own: OwnScheduler, table: ToyTable) -> None:
    while not own.is_done:
        own.step()
    for slot, prompt in enumerate(PROMPTS):
        assert own.tokens[slot][:MAX_TOKENS] == table.greedy(prompt, MAX_TOKENS)


def test_own_scheduler_generates_what_the_engine_does(runner: ModelRunner, toy_table: ToyTable) -> None:
    own = OwnScheduler(runner)
    _run_to_end(own, toy_table)
    removed = tuple(RemovedRequest(slot, "finished") for slot in own.computed)
    runner.execute_model(SchedulerOutput.empty(1, removed))
    assert runner.sample_tokens() is None
    assert runner.request_states.num_free_slots == 4
    _run_to_end(OwnScheduler(runner), toy_table)


# What is wrong -> a step for a runner whose slots 0 to 2 are running and decode from their places in `c`.
Bad = Callable[[dict[int, int]], SchedulerOutput]
BAD_STEPS: dict[str, Bad] = {
    r"slot 1.*scheduled 2 times": lambda c: replace(
        _step({1: (c[1], 1), 2: (c[2], 1)}), slots=_ints(1, 1)
    ),
    r"outside \[0, max_num_reqs=4\)": lambda c: _step({4: (1, 1)}),
    r"slots -1 to": lambda c: _step({-1: (1, 1)}),
    r"slot 3 is scheduled but holds no request": lambda c: _step({3: (1, 1)}),
    r"slot 0.*without tokens": lambda c: _step({0: (c[0], 0)}),
    r"1 \+ its drafts": lambda c: _step({0: (c[0], 2)}),
    r"max_num_batched_tokens=8": lambda c: _step({0: (c[0], 9)}),
    r"max_model_len=16": lambda c: _step({0: (15, 2)}),
    r"shapes": lambda c: replace(_step({0: (c[0], 1)}), num_scheduled_tokens=_ints(1, 1)),
    r"drafts outside": lambda c: replace(_step({0: (c[0], 2)}), num_draft_tokens=_ints(1)),
    r"slot 2, which is taken": lambda c: _step({0: (c[0], 1)}, (_new(2),)),
    r"'r0' names slot 9": lambda c: _step({0: (c[0], 1)}, (_new(0, slot=9),)),
    r"0 tokens to prefill": lambda c: _step({}, (_new(0, slot=3, prefill_token_ids=[], prompt_len=0),)),
    r"17 tokens to prefill": lambda c: _step({}, (_new(0, slot=3, prefill_token_ids=[1] * 17),)),
    r"num_computed_tokens=6": lambda c: _step({}, (_new(0, slot=3, num_computed_tokens=6),)),
    r"another num_computed_tokens": lambda c: _step({3: (0, 2)}, (_new(0, slot=3, num_computed_tokens=2),)),
    r"prompt_len=7": lambda c: _step({}, (_new(0, slot=3, prompt_len=7),)),
    r"past its prefill": lambda c: _step({3: (0, 7)}, (_new(0, slot=3),)),
    r"slot 3 is removed but holds no request": lambda c: _step({}, removed=(RemovedRequest(3, "finished"),)),
    r"removed but holds no request; remove a slot once": lambda c: _step(
        {}, removed=(RemovedRequest(0, "finished"), RemovedRequest(0, "aborted"))
    ),
    r"slot 0 is scheduled but": lambda c: _step({0: (c[0], 1)}, removed=(RemovedRequest(0, "finished"),)),
    r"block id 17 is outside": lambda c: _step(
        {0: (c[0], 1)}, blocks=BlockUpdate(_ints(0), _ints(0), _ints(1), _ints(17))
    ),
    r"block id -1 is outside": lambda c: _step(
        {0: (c[0], 1)}, blocks=BlockUpdate(_ints(0), _ints(0), _ints(1), _ints(-1))
    ),
    r"end of a run 5": lambda c: _step(
        {0: (c[0], 1)}, blocks=BlockUpdate(_ints(0), _ints(4), _ints(1), _ints(1))
    ),
    r"but there are 1 block ids": lambda c: _step(
        {0: (c[0], 1)}, blocks=BlockUpdate(_ints(0), _ints(0), _ints(2), _ints(1))
    ),
    r"slot 3 has too few blocks": lambda c: _step(
        {3: (0, 5)}, (_new(0, slot=3),), blocks=BlockUpdate(_ints(3), _ints(0), _ints(1), _ints(13))
    ),
    r"2 block updates for 1": lambda c: replace(_step({0: (c[0], 1)}), block_updates=[_blocks(), _blocks()]),
}  # fmt: skip


def test_bad_steps_are_refused_and_change_nothing(runner: ModelRunner, toy_table: ToyTable) -> None:
    own = OwnScheduler(runner)
    bad_steps = iter(BAD_STEPS.items())
    own.step()
    own.step()
    own.step()
    while not own.is_done:
        for _ in range(6):
            says, make = next(bad_steps, (None, None))
            if says is not None:
                with pytest.raises(SchedulerOutputError, match=says):
                    runner.execute_model(make(own.computed))
                assert runner.sample_tokens() is None, says
                assert runner.request_states.num_free_slots == 1, says
        own.step()
    assert next(bad_steps, None) is None, "every bad step was tried"
    _run_to_end(own, toy_table)


def test_phases_out_of_order_are_refused(runner: ModelRunner, toy_table: ToyTable) -> None:
    own = OwnScheduler(runner)
    assert runner.sample_tokens() is None
    rows = {slot: (0, own._count(slot)) for slot in own.computed}
    runner.execute_model(_step(rows, tuple(_new(slot) for slot in rows)))
    with pytest.raises(SchedulerOutputError, match="call sample_tokens"):
        runner.execute_model(_step({0: (2, 2)}))
    own.take(rows)
    _run_to_end(own, toy_table)
