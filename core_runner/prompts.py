"""The forms in which a caller may hand over prompts and their parameters, brought to one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from core_runner.errors import RequestError
from core_runner.sampling_params import SamplingParams
from model_states.loading import GenerationDefaults

# Text, token ids, or {"prompt_token_ids": ids, "model_inputs": {...}}.
Prompt = str | Sequence[int] | Mapping[str, Any]


def as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a flat list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    plain: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # an array, of numpy or torch
    if not isinstance(plain, Iterable):
        raise RequestError(f"prompts={prompts!r} must be one or many of text, token ids or mappings")
    items: list[Any] = list(plain)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def as_params(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts."""
    many = [params] * count if isinstance(params, SamplingParams) else params
    if not isinstance(many, list | tuple) or not all(isinstance(param, SamplingParams) for param in many):
        raise RequestError(
            f"sampling_params={params!r} must be a SamplingParams, or a list of one per prompt"
        )
    if len(many) != count:
        raise RequestError(f"{len(many)} sampling_params for {count} prompts; give one, or one per prompt")
    return list(many)


def default_params(defaults: GenerationDefaults) -> SamplingParams:
    """What the checkpoint recommends; greedy where it recommends no sampling."""
    given: dict[str, Any] = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**(chosen or {"temperature": 0.0}))
