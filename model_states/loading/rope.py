"""Rotary settings of a checkpoint: an unknown type, or one that transformers dropped, is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from model_states.errors import CheckpointError


def check_rope(model: str, hf_config: Any, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a rope type that transformers has no formula for."""
    for config in (hf_config, *_nested_configs(hf_config)):
        known = _known_types(config)
        for where, parameters in _rope_dicts(config):
            rope_type = parameters.get("rope_type", parameters.get("type", "default"))
            if rope_type not in known:
                raise CheckpointError(
                    f"model {model!r}: unknown rope type {rope_type!r} in {where}; "
                    f"transformers knows {', '.join(sorted(known))}"
                )


def _nested_configs(hf_config: Any) -> Iterator[Any]:
    for name in getattr(hf_config, "sub_configs", None) or {}:
        nested = getattr(hf_config, name, None)
        if nested is not None:
            yield nested


def _known_types(config: Any) -> set[str]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Some configs have a type of their own beside the shared formulas (several axes, for instance).
    return {*ROPE_INIT_FUNCTIONS, "default", getattr(config, "default_rope_type", "default")}


def _rope_dicts(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config's rope dict, or one per layer type where it is nested by them."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    for key, value in nested.items():
        yield f"rope_parameters[{key!r}]", value
    if not nested:
        yield "rope_parameters", parameters
