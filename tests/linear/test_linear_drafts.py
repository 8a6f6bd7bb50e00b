"""Rejected drafts leave no trace in the state of a linear layer, for every number of them around a block's end."""

from __future__ import annotations

import pytest
from linear.states import recomputed_state
from mamba.forced_drafts import NUM_DRAFTS, ForcedSteps, check_rejected_drafts
from model_states_linear.state import LinearState


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_rejected_drafts_leave_no_trace(name: str, num_accepted: int, tiny) -> None:
    steps, model = ForcedSteps(tiny(name).directory, LinearState), tiny(name).model
    check_rejected_drafts(steps, model, recomputed_state, num_accepted, (9, 12, 14, 15, 16, 17))


@pytest.mark.parametrize("name", ["lfm2_biased", "qwen3_5", "olmo_hybrid"])
def test_rejected_drafts_leave_no_trace_elsewhere(name: str, tiny) -> None:
    """In the other architectures, with some accepted, all and none."""
    steps, model = ForcedSteps(tiny(name).directory, LinearState), tiny(name).model
    for num_accepted in (0, 2, NUM_DRAFTS):
        check_rejected_drafts(steps, model, recomputed_state, num_accepted, (11, 14, 15, 16))
