"""Rejected drafts leave no trace in recurrent state on a GPU, whose kernels write the states of drafts themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import linear.states
import linear.tiny
import mamba.states
import pytest
from mamba.forced_drafts import NUM_DRAFTS, ForcedSteps, check_rejected_drafts
from model_states_linear.state import LinearState
from model_states_mamba.state import MambaState
from support.tiny_recurrent import save_tiny

from model_states import ModelState

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 64}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bamba", {**SIZES, "mamba_d_head": 16}),
        ("mamba", {}),
        ("falcon_h1", {**SIZES, "mamba_d_head": 16, "mamba_d_ssm": 128}),
    ],
)
def test_rejected_drafts_leave_no_trace(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path, **sizes).to("cuda")
    _check(tmp_path, MambaState, model, mamba.states.recomputed_state)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("lfm2", SIZES), *((name, {**SIZES, "head_dim": 16}) for name in ("qwen3_next", "olmo_hybrid"))],
)
def test_rejected_drafts_of_linear_layers(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    model = linear.tiny.save_tiny(name, tmp_path, **sizes).to("cuda")
    _check(tmp_path, LinearState, model, linear.states.recomputed_state)


def _check(directory: Path, kind: type[ModelState], model: Any, recomputed: Callable[..., Any]) -> None:
    steps = ForcedSteps(str(directory), kind, "cuda")
    for num_accepted in (0, 2, NUM_DRAFTS):
        check_rejected_drafts(steps, model, recomputed, num_accepted, (11, 14, 15, 16))
