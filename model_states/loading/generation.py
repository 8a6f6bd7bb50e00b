"""generation_config.json: end ids, and the sampling that a checkpoint's authors recommend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_states.config import CheckpointConfig
from model_states.errors import CheckpointError
from model_states.loading.hub import find_file, read_json


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint says about generating.

    eos_token_ids: ids that end a text; empty where the files name none. temperature, top_k, top_p: the
    recommended sampling, None where the files say nothing or ask for greedy (`do_sample` is off).
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


def load_generation_config(checkpoint: CheckpointConfig) -> GenerationDefaults:
    """Read generation_config.json; end and begin ids fall back to config.json, then to its text config.

    Raises CheckpointError for a broken file or ids that are no integers.
    """
    path = find_file(checkpoint.model, "generation_config.json")
    generation = read_json(path) if path else {}
    sources = (generation, checkpoint.raw_config, _text_config(checkpoint))
    # Where several begin ids are named, the first is the one that starts a text.
    begin = _token_ids(checkpoint.model, "bos_token_id", sources)
    # transformers ignores these numbers without do_sample, and checkpoints carry stale ones.
    sampled = bool(generation.get("do_sample", False))
    return GenerationDefaults(
        eos_token_ids=_token_ids(checkpoint.model, "eos_token_id", sources),
        bos_token_id=begin[0] if begin else None,
        temperature=_number(generation, "temperature", sampled),
        top_k=int(generation["top_k"]) if _number(generation, "top_k", sampled) is not None else None,
        top_p=_number(generation, "top_p", sampled),
    )


def _text_config(checkpoint: CheckpointConfig) -> Mapping[str, Any]:
    nested = checkpoint.raw_config.get("text_config")
    return nested if isinstance(nested, Mapping) else {}


def _token_ids(model: str, name: str, sources: tuple[Mapping[str, Any], ...]) -> tuple[int, ...]:
    """The first source that names any; one id or a list, duplicates dropped, order kept."""
    for source in sources:
        value = source.get(name)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        # bool is an int to Python; true is no token id.
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(f"model {model!r}: {name}={value!r} must be a token id or a list of them")
        return tuple(dict.fromkeys(ids))
    return ()


def _number(source: Mapping[str, Any], name: str, sampled: bool) -> float | None:
    value = source.get(name)
    if not sampled or not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value)
