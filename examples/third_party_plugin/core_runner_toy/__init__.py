"""A plugin for the architecture `ToyForCausalLM`."""

from __future__ import annotations

from model_states import ModelState, hookimpl


@hookimpl
def register_model_states() -> list[type[ModelState]]:
    """Name the toy; torch is imported only now."""
    from core_runner_toy.state import ToyState

    return [ToyState]
