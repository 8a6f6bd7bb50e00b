"""Rotary settings of a checkpoint: an unknown type, or one that transformers dropped, is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from model_states.errors import CheckpointError


def check_rope(model: str, hf_config: Any, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a rope type without a formula, and for older settings that were not taken over.

    transformers moves `rope_theta` and `rope_scaling` of older files into `rope_parameters`; a config class that
    passes them by would compute other angles than the checkpoint was trained with.
    """
    for config, raw_part in ((hf_config, raw), *_nested_configs(hf_config, raw)):
        known = _known_types(config)
        _check_taken_over(model, list(_rope_dicts(config)), raw_part)
        for where, parameters in _rope_dicts(config):
            rope_type = _rope_type(parameters)
            if rope_type not in known:
                raise CheckpointError(
                    f"model {model!r}: unknown rope type {rope_type!r} in {where}; "
                    f"transformers knows {', '.join(sorted(known))}"
                )


def _nested_configs(hf_config: Any, raw: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    for name in getattr(hf_config, "sub_configs", None) or {}:
        nested, raw_part = getattr(hf_config, name, None), raw.get(name)
        if nested is not None:
            yield nested, raw_part if isinstance(raw_part, Mapping) else {}


def _check_taken_over(model: str, found: list[tuple[str, Mapping[str, Any]]], raw: Mapping[str, Any]) -> None:
    """The new style wins where a file has both, so only files without it are asked."""
    if not found or raw.get("rope_parameters"):
        return
    theta, scaling = raw.get("rope_theta"), raw.get("rope_scaling") or {}
    if theta is not None and all(parameters.get("rope_theta") != theta for _, parameters in found):
        raise _dropped(model, f"rope_theta={theta}", found)
    wanted = scaling.get("rope_type", scaling.get("type", "default"))
    # "mrope" is plain rope over several axes; transformers keeps the axes and calls it default.
    scaled = wanted not in ("default", "mrope")
    if scaled and all(_rope_type(parameters) == "default" for _, parameters in found):
        raise _dropped(model, f"rope_scaling type {wanted!r}", found)


def _dropped(model: str, what: str, found: list[tuple[str, Mapping[str, Any]]]) -> CheckpointError:
    return CheckpointError(
        f"model {model!r}: config.json says {what}, but transformers reads {found[0][0]}={dict(found[0][1])}; "
        "write the settings into config.json as `rope_parameters`"
    )


def _rope_type(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


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
