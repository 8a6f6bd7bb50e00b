"""Base classes of the contract: `Component` implements hooks, `ModelState` is one that also has a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from model_states.hook_checks import check_hooks, implemented_hooks

if TYPE_CHECKING:
    import torch

    from model_states.batch import InputBatch
    from model_states.config import CheckpointConfig, ModelConfig

# What the core may do with a model state that says so; what each one means is in docs/hooks.md.
CAPABILITIES: Final[Mapping[str, str]] = {
    "chunked_prefill": "a prompt may be computed over several steps",
    "prefix_cache": "a prompt may start after tokens that another request computed",
    "speculation": "several tokens of a row may be computed and some of them rejected",
    "graphs": "a step may be recorded as a CUDA graph and replayed",
    "restore": "a request may bring the state after its first tokens, which are then not computed",
}

# Hooks that are called between the preparation of a step's inputs and its end.
STEP_HOOKS: Final = frozenset(
    {"preprocess_state", "prepare_attn", "prepare_inputs", "after_forward", "postprocess_state"}
)

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")


class Component:
    """A holder of state that implements hot hooks for its own cache groups and inputs.

    Mark every hook with `hookimpl`. A class with a misspelt, unmarked or ill-shaped hook raises
    `PluginHookError` when it is created, since pluggy would drop such a method without a word.

    records_step: the hooks that a whole step's graph holds (`STEP_HOOKS`) may be recorded. A replay launches what
    they launched, and does not call them. While one object implements such a hook and does not say so, graphs hold
    the model's forward alone and the hooks are called in every step.

    input_names: names of a request's `model_inputs` that it reads; a request with others, which nobody reads, is
    refused. None: it judges all names itself, in the hook `input_keys`.
    """

    records_step: ClassVar[bool] = False
    input_names: ClassVar[frozenset[str] | None] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the hooks of a new class."""
        super().__init_subclass__(**kwargs)
        check_hooks(cls)


class ModelState(Component, ABC):
    """What one architecture needs between steps, and the model itself.

    name: unique among installed model states. api_version: the contract's version it was written for.
    architectures: transformers' class names that it claims. fallback: takes models that nobody claims.
    capabilities: names out of `CAPABILITIES`; what is missing is switched off, or refused if asked for.
    options: settings of its own that a user may give as `model_options`: name -> what it is, in a line.
    embedded_tasks: the tasks whose default model is `embedded_model()`: name of the task (`model_states.tasks`) -> what
        whoever uses it should know first, as the end of a sentence that begins with "the embedded model".
    compiles_ahead: at load, steps of padding may be run in which kernels are compiled and not launched, so that
    tensors which they would have written hold garbage; no index may be made of those.
    components: filled by `__init__`; their hooks are bound after the model state's own, in this order.
    vocab_size: columns of the logits, set by `__init__`.
    """

    name: ClassVar[str]
    api_version: ClassVar[int]
    architectures: ClassVar[tuple[str, ...]] = ()
    fallback: ClassVar[bool] = False
    capabilities: ClassVar[frozenset[str]] = frozenset()
    options: ClassVar[Mapping[str, str]] = {}
    embedded_tasks: ClassVar[Mapping[str, str]] = {}
    compiles_ahead: ClassVar[bool] = False

    components: Sequence[Component]
    vocab_size: int

    def __init__(self, config: ModelConfig) -> None:
        """Load the model; `UnsupportedModelError` or `CheckpointError` if it cannot be served rightly."""
        self.config = config
        self.components = ()

    @classmethod
    def claims(cls, config: CheckpointConfig) -> bool:
        """Whether this model state wants the checkpoint; by default, if it names the architecture."""
        return config.architecture in cls.architectures

    @classmethod
    def unsupported(cls, config: CheckpointConfig) -> str | None:
        """Why the checkpoint cannot be served though this class was chosen, or None when it can.

        Asked before anything is loaded. By default a fallback declines a model type that transformers does
        not know.
        """
        if cls.fallback and config.hf_config is None and not cls.claims(config):
            return (
                "no plugin claims it and transformers does not know its model type; install a plugin for it"
            )
        return None

    @classmethod
    def max_model_len(cls, config: CheckpointConfig) -> int | None:
        """Longest sequence in tokens that the model has positions for; None where the config is silent."""
        for level in _config_levels(config):
            for field in _LENGTH_FIELDS:
                value = level.get(field) if isinstance(level, Mapping) else getattr(level, field, None)
                if isinstance(value, int) and value > 0:
                    return value
        return None

    @classmethod
    def embedded_model(cls) -> Path | None:
        """Directory of a model that is shipped inside the plugin's package, or None. Users call it
        "embedded:NAME", NAME being the class's `name`.
        """
        return None

    def tasks(self) -> Mapping[str, Any]:
        """What the model can do beyond completions: name -> task, as `model_states.tasks` describes each name."""
        return {}

    @abstractmethod
    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens_padded, hidden_size] of the step; rows past `batch.num_tokens` are
        nobody's.

        `inputs` are the merged results of `prepare_inputs`. No host synchronisation, no dependence on
        padding.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden_size], any float dtype."""


def _config_levels(config: CheckpointConfig) -> list[Any]:
    """Places where a length may be written: a multimodal config keeps it one level down."""
    raw = config.raw_config
    return [config.hf_config, getattr(config.hf_config, "text_config", None), raw, raw.get("text_config")]


def may_record_step(implementation: Component) -> bool:
    """Whether a graph of a whole step may hold the hooks of `implementation`."""
    return implementation.records_step or STEP_HOOKS.isdisjoint(implemented_hooks(type(implementation)))
