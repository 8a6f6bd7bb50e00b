"""State space models and their hybrids: Mamba, Mamba-2 and attention in any mixture that transformers defines."""

from __future__ import annotations

from model_states import ModelState, hookimpl


@hookimpl
def register_model_states() -> list[type[ModelState]]:
    """The one model state; heavy imports wait until it is asked for."""
    from model_states_mamba.state import MambaState

    return [MambaState]
