"""A transformers module with every parameter filled, or an error that names what is missing.

Tied embeddings follow transformers, so results equal its own: without a head in the files the embedding is
the head; with an equal head likewise; with a different head, that head is used and a warning names it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from model_states.config import CheckpointConfig, ModelConfig
from model_states.errors import CheckpointError, UnsupportedModelError
from model_states.loading.dummy import build_dummy_model
from model_states.loading.files import WeightFiles, find_weight_files, read_tensors
from model_states.loading.progress import reported_loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def load_transformers_model(
    config: ModelConfig, *, attn_implementation: str, model_class: type | None = None
) -> PreTrainedModel:
    """Build and fill a checkpoint's module in `config.dtype` on `config.device`, in eval mode, no gradients.

    attn_implementation: a name registered in transformers' attention interface. model_class: None takes the
    class that `architectures` names, or transformers' default for causal language models. The load format
    "dummy" fills seeded random weights and needs config.json only.
    Raises CheckpointError for files that are missing, broken or do not fill every parameter (tensors are
    named), UnsupportedModelError where transformers has no class, or `model_class` is for other checkpoints.
    Unused tensors are listed in one warning.
    """
    checkpoint = config.checkpoint
    if checkpoint.hf_config is None:
        raise UnsupportedModelError(
            f"model {checkpoint.model!r} ({checkpoint.architecture}): transformers does not know "
            f"model_type {checkpoint.raw_config.get('model_type')!r}; upgrade transformers or install "
            "a plugin for it"
        )
    wanted = getattr(model_class, "config_class", None)
    if model_class and wanted and not isinstance(checkpoint.hf_config, wanted):
        raise UnsupportedModelError(
            f"model {checkpoint.model!r} is a {checkpoint.architecture}, which cannot be loaded as "
            f"{model_class.__name__}; leave out model_state to have one chosen"
        )
    # The plugin knows best; then the files; transformers' default serves the many.
    chosen = model_class or _model_class(checkpoint)
    if config.load_format == "dummy":
        model = build_dummy_model(config, chosen, attn_implementation)
    else:
        model = _load(config, chosen, attn_implementation)
    model.eval()
    model.requires_grad_(False)
    return model


def _model_class(checkpoint: CheckpointConfig) -> Any:
    """The class that `architectures` names if it can generate, else transformers' default for the config."""
    import transformers

    named: Any = getattr(transformers, checkpoint.architecture, None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    # A base class without a head is named by some files; with it no token could be sampled.
    if is_model and named.can_generate():
        return named
    return transformers.AutoModelForCausalLM


def _load(config: ModelConfig, model_class: Any, attn_implementation: str) -> PreTrainedModel:
    checkpoint = config.checkpoint
    files = find_weight_files(checkpoint.model)
    with reported_loading(config.progress) as reports:
        try:
            model, info = model_class.from_pretrained(
                **_source(files),
                # A copy: transformers writes dtype and attention into it, and the checkpoint may load again.
                config=copy.deepcopy(checkpoint.hf_config),
                dtype=config.dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=checkpoint.trust_remote_code,
                use_safetensors=True,
                # A wrong shape is reported below with its name; transformers' own error has none.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            details = "\n".join([str(error), *reports])
            raise CheckpointError(f"model {checkpoint.model!r} could not be loaded: {details}") from error
    _check_filled(checkpoint.model, info)
    _warn_unused(checkpoint.model, info["unexpected_keys"])
    _warn_second_head(checkpoint.model, model)
    # Filled on the CPU and moved once: placing tensor by tensor would need accelerate.
    placed: PreTrainedModel = model.to(config.device)
    return placed


def _source(files: WeightFiles) -> dict[str, Any]:
    """transformers finds standard names itself; other files are handed over as tensors."""
    if files.standard:
        return {"pretrained_model_name_or_path": str(files.directory)}
    return {"pretrained_model_name_or_path": None, "state_dict": read_tensors(files.paths)}


def _check_filled(model: str, info: Mapping[str, Any]) -> None:
    wrong = [
        f"{name}: {tuple(found)} in the files, {tuple(expected)} in the model"
        for name, found, expected in sorted(info["mismatched_keys"])
    ]
    if wrong:
        raise CheckpointError(
            f"model {model!r}: {len(wrong)} tensors have another shape than config.json says: {_some(wrong)}"
        )
    if info["missing_keys"]:
        raise CheckpointError(
            f"model {model!r}: the files lack {len(info['missing_keys'])} tensors, which would be left "
            f"random: {_some(info['missing_keys'])}; the checkpoint is incomplete, or config.json is "
            "another model's"
        )


def _warn_unused(model: str, names: Iterable[str]) -> None:
    unused = sorted(names)
    if unused:
        logger.warning(
            "model %r: %d tensors of the files are not used: %s", model, len(unused), ", ".join(unused)
        )


def _warn_second_head(model: str, module: Any) -> None:
    if not getattr(module.config, "tie_word_embeddings", False):
        return
    # Asked of the module, not of log lines: identity is what tying means.
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or embedding is None or head.weight is embedding.weight:
        return
    name = next((name for name, value in module.named_parameters() if value is head.weight), "the head")
    logger.warning(
        "model %r: config.json ties the head to the embedding, but the files hold a different %s; "
        "the head of the files is used, as transformers does",
        model,
        name,
    )


def _some(names: Iterable[str], most: int = 8) -> str:
    ordered = sorted(names)
    rest = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")
