"""`LinearState`: a transformers model whose linear layers keep recurrent state, and whose attention is paged."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

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
from model_states_linear.mixers import MIXERS

logger = logging.getLogger(__name__)

# Compared token for token with transformers in tests/linear.
ARCHITECTURES = (
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "OlmoHybridForCausalLM",
)
# Their language model is served alone.
MULTIMODAL = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


class LinearState(ModelState):
    """Recurrent state for the layers with a mixer, and paged attention for the others."""

    name: ClassVar[str] = "linear"
    api_version: ClassVar[int] = 1
    architectures: ClassVar[tuple[str, ...]] = ARCHITECTURES + MULTIMODAL
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
        model = load_transformers_model(
            config, attn_implementation=ATTN_IMPLEMENTATION, model_class=_model_class(config)
        )
        self.model = TransformersModel(model)
        refuse_batch_dependent_rope(self.model.architecture, self.model.config, config.max_model_len)
        calls = self.model.attention_calls(every_layer=False)
        mixers = replace_mixers(model, MIXERS)
        num_layers = self.model.config.num_hidden_layers
        if not mixers or len(mixers) + len(calls) != num_layers:
            raise UnsupportedModelError(
                f"{self.model.architecture} has {num_layers} layers, of which {len(mixers)} have a mixer that this "
                f"model state knows and {len(calls)} are attention"
            )
        recurrent = RecurrentState(
            config, [mixer.state_tensors(config) for mixer in mixers], is_alone=not calls
        )
        for mixer, layer in zip(mixers, recurrent.layers, strict=True):
            mixer.attach(layer, config)
        parts: list[StatePart] = [recurrent]
        layers: list[AttentionLayer] = []
        if calls:
            paged = PagedAttention(config, [call.spec for call in calls])
            layers = paged.layers
            parts.append(paged)
        self.components: list[Component] = [*parts, StateTransfer(parts)]
        if config.fused_layers:
            self._fuse(calls, layers)
        self.model.bind(calls, layers)
        self.vocab_size = self.model.vocab_size

    def _fuse(self, calls: Sequence[AttentionCall], layers: Sequence[AttentionLayer]) -> None:
        """Run the whole model as one loop, if it is of a known form; else fuse the parts that are known."""
        model = self.model
        model.fused_head = recognise_head(model)
        rewrite_experts(model.backbone)
        fused = recognise_hybrid(model, calls, layers, self.config.max_model_len)
        if fused is None:
            rewrite_parts(model.backbone, {})
        model.fused = fused
        logger.info(
            "%s: %s", model.architecture, "parts are fused" if fused is None else "all layers are fused"
        )

    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens_padded, hidden] of the batch's flat tokens."""
        return self.model.forward(batch.input_ids, batch.positions, **inputs)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden_states [n, hidden]."""
        return self.model.compute_logits(hidden_states)


def _model_class(config: ModelConfig) -> Any:
    """The language model of a checkpoint that holds more; None where there is no more."""
    if config.checkpoint.architecture not in MULTIMODAL:
        return None
    from transformers import AutoModelForCausalLM

    logger.warning("%s: its language model is served, without images", config.checkpoint.architecture)
    return AutoModelForCausalLM
