"""Linear attention and short convolutions beside attention: gated delta nets, and hybrids of convolutions."""

from __future__ import annotations

from model_states import ModelState, hookimpl


@hookimpl
def register_model_states() -> list[type[ModelState]]:
    """The one model state; heavy imports wait until it is asked for."""
    from model_states_linear.state import LinearState

    return [LinearState]
