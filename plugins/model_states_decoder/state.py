"""`DecoderState`: a transformers causal LM over paged attention. The state is one component."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import ClassVar

import torch

from model_states import InputBatch, ModelConfig, ModelState
from model_states.components import PagedAttention
from model_states.loading import load_transformers_model
from model_states.rewrites import fuse_layers
from model_states.transformers_bridge import (
    ATTN_IMPLEMENTATION,
    TransformersModel,
    refuse_batch_dependent_rope,
    register_attention,
)
from model_states_decoder.latent_attention import LatentAttention, is_latent, watched_projections
from model_states_decoder.self_check import check_paged_equals_eager

logger = logging.getLogger(__name__)

# Compared token for token with transformers' own generate in tests/decoder. Others are served as the fallback,
# after a numerical self-check at load.
TESTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "GPTNeoXForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "GraniteMoeForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "SmolLM3ForCausalLM",
    "Cohere2ForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)


class DecoderState(ModelState):
    """Paged attention for every layer, found by watching which attention calls the model makes."""

    name: ClassVar[str] = "decoder"
    api_version: ClassVar[int] = 1
    architectures: ClassVar[tuple[str, ...]] = TESTED_ARCHITECTURES
    fallback: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[str]] = frozenset({"chunked_prefill", "prefix_cache", "graphs"})
    compiles_ahead: ClassVar[bool] = True

    def __init__(self, config: ModelConfig) -> None:
        """Load the checkpoint, find its attention layers and bind them to the paged caches.

        Raises `UnsupportedModelError` for a model that this path could only serve wrongly.
        """
        super().__init__(config)
        register_attention()
        self.model = TransformersModel(
            load_transformers_model(config, attn_implementation=ATTN_IMPLEMENTATION)
        )
        refuse_batch_dependent_rope(self.model.architecture, self.model.config, config.max_model_len)
        with watched_projections(self.model.model):
            calls = self.model.attention_calls()
            latent = {i: LatentAttention(call) for i, call in enumerate(calls) if is_latent(call)}
        specs = [latent[i].spec if i in latent else call.spec for i, call in enumerate(calls)]
        attention = PagedAttention(config, specs)
        for i, layer in latent.items():
            layer.layer = attention.layers[i]
        layers = [latent.get(i, layer) for i, layer in enumerate(attention.layers)]
        self.model.bind(calls, layers)
        self.components = [attention]
        self.vocab_size = self.model.vocab_size
        if self.model.architecture not in self.architectures:
            check_paged_equals_eager(self.model, attention, config)
        if config.fused_layers:
            fuse_layers(self.model, calls, layers, config.max_model_len)

    @classmethod
    def embedded_model(cls) -> Path | None:
        """The small model that ships with this plugin."""
        return Path(__file__).parent / "embedded_model"

    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens_padded, hidden] of the batch's flat tokens."""
        return self.model.forward(batch.input_ids, batch.positions, **inputs)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden_states [n, hidden]."""
        return self.model.compute_logits(hidden_states)
