"""config.json: read as it stands, and through transformers where it knows the model type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_states.config import CheckpointConfig
from model_states.errors import CheckpointError
from model_states.loading.hub import find_file, read_json
from model_states.loading.rope import check_rope


def load_checkpoint_config(model: str, *, trust_remote_code: bool = False) -> CheckpointConfig:
    """Read the configuration of a hub name or local directory.

    `hf_config` is None for a model type that transformers does not know: a plugin may know it. Both styles of
    config.json are accepted: `rope_parameters`, `dtype`, and `rope_theta`, `rope_scaling`, `torch_dtype`.
    Raises CheckpointError: no such model, no or broken config.json, no architecture, remote code that was not
    asked for, an unknown rope type.
    """
    path = find_file(model, "config.json")
    if path is None:
        raise CheckpointError(
            f"model {model!r} has no config.json: it is not a checkpoint in transformers' format"
        )
    raw = read_json(path)
    known = _is_known(raw)
    _refuse_remote_code(model, raw, known, trust_remote_code)
    hf_config = None
    if known or (trust_remote_code and "auto_map" in raw):
        # Remote code lies beside config.json on the hub, so it is asked for under the model's own name.
        source = model if trust_remote_code and "auto_map" in raw else str(path.parent)
        hf_config = _load_hf_config(model, source, raw, trust_remote_code)
        check_rope(model, hf_config, raw)
        _lift_tie_flag(raw, hf_config)
    return CheckpointConfig(
        model=model,
        architecture=_architecture(model, raw),
        raw_config=raw,
        hf_config=hf_config,
        trust_remote_code=trust_remote_code,
    )


def _is_known(raw: Mapping[str, Any]) -> bool:
    from transformers import CONFIG_MAPPING

    return raw.get("model_type") in CONFIG_MAPPING


def _refuse_remote_code(model: str, raw: Mapping[str, Any], known: bool, trusted: bool) -> None:
    """A type that transformers knows is served by transformers' own code, whatever `auto_map` offers."""
    if raw.get("auto_map") and not known and not trusted:
        raise CheckpointError(
            f"model {model!r} brings its own code (auto_map: {', '.join(raw['auto_map'])}) and its "
            f"model_type {raw.get('model_type')!r} is unknown to transformers; read that code, then pass "
            "trust_remote_code=True to run it, or install a plugin that registers this model type"
        )


def _load_hf_config(model: str, source: str, raw: Mapping[str, Any], trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:
        # transformers raises many kinds here: its field validators, KeyError for rope fields, import errors.
        raise CheckpointError(
            f"model {model!r}: transformers refuses config.json (model_type {raw.get('model_type')!r}): "
            f"{error}"
        ) from error


def _lift_tie_flag(raw: Mapping[str, Any], hf_config: Any) -> None:
    """Honour a tie flag that stands in the nested text config alone; transformers asks the outer one."""
    try:
        text_config = hf_config.get_text_config(decoder=True)
    except ValueError:
        return  # several text configs: none of them speaks for the whole model
    if "tie_word_embeddings" in raw or text_config is hf_config:
        return
    for key, nested in raw.items():
        flagged = isinstance(nested, Mapping) and "tie_word_embeddings" in nested
        if flagged and getattr(hf_config, key, None) is text_config:
            hf_config.tie_word_embeddings = bool(nested["tie_word_embeddings"])


def _architecture(model: str, raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or ()
    if architectures and isinstance(architectures[0], str):
        return architectures[0]
    derived = _default_class_name(raw.get("model_type"))
    if derived is None:
        raise CheckpointError(
            f"model {model!r}: config.json names no `architectures`, and transformers has no default class "
            f"for model_type {raw.get('model_type')!r}; add the model's class name to `architectures`"
        )
    return derived


def _default_class_name(model_type: Any) -> str | None:
    from transformers.models.auto import modeling_auto

    # A decoder alone goes before a speech model: one model type may have both.
    for table in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"):
        name = getattr(modeling_auto, table, {}).get(model_type)
        if name is not None:
            return str(name if isinstance(name, str) else name[0])
    return None
