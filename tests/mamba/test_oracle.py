"""Why full recomputation is the oracle: of some models, transformers' one-token step with a cache is another model.

If one of these fails after an update of transformers, the note in docs/recurrent_state.md is out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import linear.tiny
import pytest
from support import tiny_recurrent
from support.reference import greedy_reference
from support.tiny_recurrent import TINY, retraced_reference

PROMPT = [(13 * i) % 200 + 3 for i in range(40)]
# A bound of the time step that only whole sequences are held to, and the options that lift it.
UNCLAMPED: dict[str, dict[str, Any]] = {
    "mamba2": {"time_step_limit": (0.0, float("inf"))},
    "nemotron_h": {"time_step_min": 1e-9},
    "zamba2": {"time_step_min": 1e-9},
}
# transformers makes no cache for models without any attention.
AGREE = [name for name in (*TINY, *linear.tiny.TINY) if name not in (*UNCLAMPED, "qwen3_5_only_linear")]


def _disagreement(build: Callable[..., Any], name: str, **overrides: Any) -> float:
    """Largest difference of any log-probability between cached steps and one pass over all of their tokens."""
    model = build(name, **overrides)
    cached = greedy_reference(model, PROMPT, 8)
    whole = retraced_reference(model, PROMPT, cached.token_ids)
    return float((cached.logprobs - whole.logprobs).abs().max())


@pytest.mark.parametrize("name", UNCLAMPED)
def test_cached_steps_leave_out_the_clamp(name: str) -> None:
    build = tiny_recurrent.build_tiny
    assert _disagreement(build, name) > 1e-3
    assert _disagreement(build, name, **UNCLAMPED[name]) < 1e-4


@pytest.mark.parametrize("name", AGREE)
def test_cached_steps_agree_elsewhere(name: str) -> None:
    build = tiny_recurrent.build_tiny if name in TINY else linear.tiny.build_tiny
    assert _disagreement(build, name) < 1e-4
