"""`MambaState`: a transformers model whose mixers keep recurrent state, and whose attention layers are paged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from model_states import Component, InputBatch, ModelConfig, ModelState, UnsupportedModelError
from model_states.components import (
    AttentionLayer,
    PagedAttention,
    RecurrentState,
    StatePart,
    StateTransfer,
)
from model_states.components.recurrent_state import STATE_OPTIONS
from model_states.loading import load_transformers_model
from model_states.rewrites.experts import rewrite_experts
from model_states.rewrites.head import recognise_head
from model_states.rewrites.hybrid import recognise_hybrid
from model_states.rewrites.mixer import replace_mixers
from model_states.rewrites.parts import rewrite_parts
from model_states.transformers_bridge import (
    ATTN_IMPLEMENTATION,
    AttentionCall,
    TransformersModel,
    refuse_batch_dependent_rope,
    register_attention,
)
from model_states_mamba.backbone import recognise_mixer_backbone
from model_states_mamba.mixers import MIXERS

logger = logging.getLogger(__name__)

# Compared token for token with transformers in tests/mamba.
ARCHITECTURES = (
    "MambaForCausalLM",
    "FalconMambaForCausalLM",
    "Mamba2ForCausalLM",
    "BambaForCausalLM",
    "JambaForCausalLM",
    "NemotronHForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "FalconH1ForCausalLM",
    "Zamba2ForCausalLM",
)


class MambaState(ModelState):
    """Recurrent state for the mixers, and paged attention for as many attention calls as the model makes."""

    name: ClassVar[str] = "mamba"
    api_version: ClassVar[int] = 1
    architectures: ClassVar[tuple[str, ...]] = ARCHITECTURES
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"chunked_prefill", "prefix_cache", "graphs", "restore"}
    )
    options: ClassVar[Mapping[str, str]] = STATE_OPTIONS

    def __init__(self, config: ModelConfig) -> None:
        """Load the checkpoint, replace its mixers, and bind its attention layers to paged caches.

        Raises `UnsupportedModelError` for a model whose layers are of another kind.
        """
        super().__init__(config)
        register_attention()
        model = load_transformers_model(config, attn_implementation=ATTN_IMPLEMENTATION)
        self.model = TransformersModel(model)
        refuse_batch_dependent_rope(self.model.architecture, self.model.config, config.max_model_len)
        with _without_advice():
            calls = self.model.attention_calls(every_layer=False)
        mixers = replace_mixers(model, MIXERS)
        if not mixers:
            raise UnsupportedModelError(f"{self.model.architecture} has no mixer that this model state knows")
        tensors = [mixer.state_tensors(config) for mixer in mixers]
        recurrent = RecurrentState(config, tensors, is_alone=not calls)
        for mixer, layer in zip(mixers, recurrent.layers, strict=True):
            mixer.attach(layer, config)
        parts: list[StatePart] = [recurrent]
        self._attentions: list[_Attention] = []
        layers: list[AttentionLayer] = []
        if calls:
            paged = PagedAttention(config, [call.spec for call in calls])
            layers = paged.layers
            parts.append(paged)
        self.components: list[Component] = [*parts, StateTransfer(parts)]
        if config.fused_layers:
            self._fuse(calls, layers)
        if calls:
            self._attentions = _bind(self.model, calls, layers)
        self.vocab_size = self.model.vocab_size

    @classmethod
    def embedded_model(cls) -> Path | None:
        """The small hybrid that ships with this plugin."""
        return Path(__file__).parent / "embedded_model"

    def _fuse(self, calls: Sequence[AttentionCall], layers: Sequence[AttentionLayer]) -> None:
        """Run the whole model as one loop, if it is of a known form; else fuse the parts that are known."""
        model = self.model
        model.fused_head = recognise_head(model)
        rewrite_experts(model.backbone)
        fused: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
        fused = recognise_mixer_backbone(model.backbone)
        fused = fused or recognise_hybrid(model, calls, layers, self.config.max_model_len)
        if fused is None:
            rewrite_parts(model.backbone, {})
        model.fused = fused
        logger.info(
            "%s: %s", model.architecture, "parts are fused" if fused is None else "all layers are fused"
        )

    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens_padded, hidden] of the batch's flat tokens."""
        for attention in self._attentions:
            attention.num_calls = 0
        return self.model.forward(batch.input_ids, batch.positions, **inputs)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden_states [n, hidden]."""
        return self.model.compute_logits(hidden_states)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Leave out transformers' advice to install faster kernels for mixers that are about to be replaced."""
    log = logging.getLogger("transformers.integrations.hub_kernels")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


class _Attention:
    """The attention of one module, which a model may call at several depths: each call has a cache of its own."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []
        self.num_calls = 0

    def __call__(self, *args: Any) -> torch.Tensor:
        layer = self.layers[self.num_calls]
        self.num_calls += 1
        return layer(*args)


def _bind(
    model: TransformersModel, calls: Sequence[AttentionCall], layers: Sequence[AttentionLayer]
) -> list[_Attention]:
    """Send the calls of each module to the layers that they are, in the order in which a forward makes them."""
    by_module: dict[nn.Module, _Attention] = {}
    for call, layer in zip(calls, layers, strict=True):
        by_module.setdefault(call.module, _Attention()).layers.append(layer)
    model.bind(calls, [by_module[call.module] for call in calls])
    return list(by_module.values())
