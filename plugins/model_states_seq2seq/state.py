"""`TextToTextState`: the decoder over paged attention, the encoder's output as cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_states import InputBatch, ModelConfig, ModelState
from model_states.components.cross_attention import ENCODER_OPTIONS
from model_states.encoder_decoder import CrossDecoder
from model_states.loading import load_transformers_model
from model_states_seq2seq.encoder import TextEncoder


class TextToTextState(ModelState):
    """Prompt tokens are the decoder's; the text to read comes as `model_inputs` (see `TextEncoder`).

    A prompt begins with the model's decoder_start_token_id, and with its forced_bos_token_id where it has one.
    """

    name: ClassVar[str] = "seq2seq"
    api_version: ClassVar[int] = 1
    architectures: ClassVar[tuple[str, ...]] = ("BartForConditionalGeneration",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"chunked_prefill", "prefix_cache", "graphs"})
    options: ClassVar[Mapping[str, str]] = ENCODER_OPTIONS

    def __init__(self, config: ModelConfig) -> None:
        """Load the checkpoint and put its decoder's layers over the two kinds of attention."""
        super().__init__(config)
        from transformers import BartForConditionalGeneration

        model: Any = load_transformers_model(
            config, attn_implementation="sdpa", model_class=BartForConditionalGeneration
        )
        decoder = model.model.decoder
        # Its embeddings and the norm over them are small modules of their own, which take flat tokens as they are.
        self._embed, self._embed_position = decoder.embed_tokens, decoder.embed_positions
        self._norm = decoder.layernorm_embedding
        self._head, self._logits_bias = model.lm_head, model.final_logits_bias[0].to(config.dtype)
        self.vocab_size = self._head.weight.shape[0]
        longest = model.config.max_position_embeddings
        self.encoder = TextEncoder(model.model.encoder, longest, self.vocab_size, config.device)
        self._decoder = CrossDecoder(config, decoder.layers, self.encoder, norm_first=False)
        self.components = self._decoder.components
        self.cross_attention = self._decoder.cross_attention

    @torch.inference_mode()
    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens_padded, hidden_size] of the batch's flat tokens."""
        positions = batch.positions + self._embed_position.offset
        embedded = self._embed(batch.input_ids) + self._embed_position.weight[positions]
        return self._decoder(self._norm(embedded))

    @torch.inference_mode()
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden_size]."""
        logits: torch.Tensor = self._head(hidden_states) + self._logits_bias
        return logits
