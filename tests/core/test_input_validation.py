"""Steps that break a rule of the runner are refused by name and value, before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from naive_world import ints

from core_runner.block_tables import BlockTables
from core_runner.errors import SchedulerOutputError
from core_runner.input_batch import InputPreparer
from core_runner.request_states import RequestStates
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import BlockUpdate, NewRequest, RemovedRequest, SchedulerOutput


@pytest.fixture
def served() -> tuple[InputPreparer, SchedulerOutput]:
    """Slot 0 decodes at 6 known tokens, slot 1 has 3 of 9 prefill tokens computed, slot 2 is free."""
    states = RequestStates(3, 20, 2, "cpu")
    tables = BlockTables([(4, None)], 3, 20, "cpu", num_blocks=[10])
    states.add(NewRequest("a", 0, [1] * 5, 5, SamplingParams(), 0))
    states.add(NewRequest("b", 1, [1] * 9, 9, SamplingParams(), 0))
    tables.apply_update(0, BlockUpdate(ints([0, 1]), ints([0, 0]), ints([2, 2]), ints([1, 2, 3, 4])))
    preparer = InputPreparer(states, tables, 8, torch.device("cpu"))
    step = SchedulerOutput([], [], [], ints([1, 0]), ints([4, 3]), ints([3, 5]), ints([0, 2]))
    preparer.validate(step)
    return preparer, step


FREE = NewRequest("c", 2, [1, 2, 3], 3, SamplingParams(), 0, num_computed_tokens=1)
BAD_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "slot twice": ({"slots": ints([0, 0])}, "slot 0 is scheduled 2 times"),
    "null slot": ({"slots": ints([0, 3])}, "slots 0 to 3 reach outside [0, max_num_reqs=3)"),
    "negative slot": ({"slots": ints([0, -1])}, "slots -1 to 0 reach outside"),
    "free slot": ({"slots": ints([1, 2])}, "slot 2 is scheduled but holds no request"),
    "removed slot": ({"removed": [RemovedRequest(0, "aborted")]}, "slot 0 is scheduled but holds no request"),
    "no tokens": (
        {"num_scheduled_tokens": ints([0, 3])},
        "slot 1 is scheduled without tokens; leave it out (0)",
    ),
    "over T": ({"num_scheduled_tokens": ints([6, 3])}, "9 tokens are scheduled, more than max_num_batched"),
    "over L": ({"num_computed_tokens": ints([3, 18])}, "slot 0 would grow past max_model_len=20 (21)"),
    "computed past L": (
        {"num_computed_tokens": ints([3, 2**31 - 2])},
        "slot 0 has tokens computed outside [0, 20)",
    ),
    "negative computed": ({"num_computed_tokens": ints([-1, 5])}, "slot 1 has tokens computed outside"),
    "past its prefill": (
        {"num_computed_tokens": ints([6, 5])},
        "slot 1 has a chunk that reaches past its prefill",
    ),
    "drafts over K": ({"num_draft_tokens": ints([0, 3])}, "slot 0 has drafts outside [0, K=2] (3)"),
    "drafts in prefill": (
        {"num_draft_tokens": ints([1, 2])},
        "slot 1 has drafts while its prefill is not finished",
    ),
    "decode of too many": ({"num_draft_tokens": ints([0, 1])}, "slot 0 decodes, so it needs 1 + its drafts"),
    "too few blocks": ({"num_computed_tokens": ints([3, 6])}, "slot 0 has too few blocks in cache group 0"),
    "ragged": ({"num_scheduled_tokens": ints([4])}, "each must be [num_reqs]"),
    "bad update": (
        {"block_updates": [BlockUpdate(ints([0]), ints([4]), ints([2]), ints([1, 2]))]},
        "end of a run 6 is outside [0, 5]",
    ),
    "bad admission": ({"new_requests": [replace(FREE, prompt_len=4)]}, "prompt_len=4, outside [0, 3]"),
    "admission and row disagree": (
        {
            "new_requests": [FREE],
            "slots": ints([2, 0]),
            "num_scheduled_tokens": ints([3, 3]),
            "num_computed_tokens": ints([0, 5]),
        },
        "slot 2 has another num_computed_tokens than its admission says (0)",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_bad_step_is_refused_and_the_good_one_still_runs(
    served: tuple[InputPreparer, SchedulerOutput], change: dict[str, Any], message: str
) -> None:
    preparer, step = served
    with pytest.raises(SchedulerOutputError) as error:
        preparer.validate(replace(step, **change))
    assert message in str(error.value)
    preparer.validate(step)


def test_removal_admission_blocks_and_row_of_one_slot_in_one_step(
    served: tuple[InputPreparer, SchedulerOutput],
) -> None:
    preparer, step = served
    update = BlockUpdate(ints([0]), ints([0]), ints([1]), ints([9]))
    again = SchedulerOutput(
        [RemovedRequest(0, "preempted")], [replace(FREE, slot=0)], [update], ints([0]), ints([2]), ints([1])
    )
    preparer.validate(again)
    with pytest.raises(SchedulerOutputError, match="too few blocks"):
        preparer.validate(replace(again, block_updates=[]))
    preparer.validate(step)


def test_a_trusted_step_is_checked_in_poison_mode_alone(
    served: tuple[InputPreparer, SchedulerOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer, step = served
    bad = replace(step, slots=ints([0, 0]), is_trusted=True)
    preparer.validate(bad)
    monkeypatch.setattr(preparer._states, "poison", True)
    with pytest.raises(SchedulerOutputError, match="slot 0 is scheduled 2 times"):
        preparer.validate(bad)


def test_a_step_of_ones_own_cannot_claim_to_be_a_repetition(
    served: tuple[InputPreparer, SchedulerOutput],
) -> None:
    preparer, step = served
    with pytest.raises(SchedulerOutputError, match="is_repeat is for steps of core_runner's own Scheduler"):
        preparer.validate(replace(step, is_repeat=True))
