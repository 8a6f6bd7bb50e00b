"""The hooks by name: their arguments, their order, and how the results of several implementations combine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, Literal

from model_states.hookspecs import PROJECT_NAME, ColdHooks, HotHooks

Combine = Literal["notify", "concatenate", "merge", "chain"]


def hook_functions(specs: type) -> dict[str, Callable[..., Any]]:
    """Name -> spec function of `ColdHooks` or `HotHooks`, in the order of the file."""
    return {name: f for name, f in vars(specs).items() if hasattr(f, f"{PROJECT_NAME}_spec")}


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a spec's arguments without `self`, in order; a bound call passes them by position."""
    return tuple(inspect.signature(function).parameters)[1:]


COLD_HOOKS: Final = tuple(hook_functions(ColdHooks))
HOT_HOOK_ARGUMENTS: Final = {name: argument_names(f) for name, f in hook_functions(HotHooks).items()}
HOT_HOOKS: Final = tuple(HOT_HOOK_ARGUMENTS)

_COMBINE: Final[dict[str, Combine]] = {
    "cache_groups": "concatenate",
    "logits_processors": "concatenate",
    "input_keys": "merge",
    "reserve": "merge",
    "prepare_inputs": "merge",
    "prepare_dummy_inputs": "merge",
    "custom_sampler": "chain",
}


def combine_rule(hook: str) -> Combine:
    """How the results of several implementations of a hot hook become one; "notify" has no result."""
    return _COMBINE.get(hook, "notify")
