"""`WhisperState`: the decoder over paged attention, the encoder's output as cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from model_states import CheckpointConfig, InputBatch, LogitsProcessor, ModelConfig, ModelState, hookimpl
from model_states.components.cross_attention import ENCODER_OPTIONS
from model_states.encoder_decoder import CrossDecoder, ShiftedNorm, pad_rows
from model_states.kernels.linear import linear
from model_states.loading import load_transformers_model
from model_states.sampler import Sampler
from model_states.tasks import TRANSCRIPTION
from model_states_whisper.encoder import SpeechEncoder
from model_states_whisper.features import load_feature_config
from model_states_whisper.rules import GreedyTranscription, TranscriptionRules
from model_states_whisper.tokens import WhisperTokens
from model_states_whisper.transcriber import WhisperTranscriber


class WhisperState(ModelState):
    """Prompt tokens are the decoder's; the audio comes as `model_inputs` (see `SpeechEncoder`).

    tokens: the checkpoint's special tokens, which prompts are made of. decoder, norm: the layers, and the norm behind
    them.
    """

    name: ClassVar[str] = "whisper"
    api_version: ClassVar[int] = 1
    architectures: ClassVar[tuple[str, ...]] = ("WhisperForConditionalGeneration",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"chunked_prefill", "prefix_cache", "graphs"})
    options: ClassVar[Mapping[str, str]] = ENCODER_OPTIONS
    compiles_ahead: ClassVar[bool] = True
    embedded_tasks: ClassVar[Mapping[str, str]] = {
        TRANSCRIPTION: "understands synthetic speech only; give --model openai/whisper-small"
    }

    def __init__(self, config: ModelConfig) -> None:
        """Load the checkpoint and put its decoder's layers over the two kinds of attention."""
        super().__init__(config)
        from transformers import WhisperForConditionalGeneration

        model: Any = load_transformers_model(
            config, attn_implementation="sdpa", model_class=WhisperForConditionalGeneration
        )
        decoder = model.model.decoder
        self.vocab_size = len(model.proj_out.weight)
        self._head = pad_rows(model.proj_out.weight)
        self._embedding: torch.Tensor = decoder.embed_tokens.weight
        if self._embedding is model.proj_out.weight:
            self._embedding = self._head[: self.vocab_size]
        self._position_embedding: torch.Tensor = decoder.embed_positions.weight
        self._embedding_scale = float(decoder.embed_scale)
        features = load_feature_config(config.checkpoint)
        self.encoder = SpeechEncoder(model.model.encoder, features, config.dtype, config.device)
        self.decoder = CrossDecoder(config, decoder.layers, self.encoder, norm_first=True)
        self.norm = ShiftedNorm(decoder.layer_norm, self.decoder.shift)
        self.components = self.decoder.components
        self.cross_attention = self.decoder.cross_attention
        self.tokens = WhisperTokens.load(config.checkpoint)

    @classmethod
    def max_model_len(cls, config: CheckpointConfig) -> int | None:
        """Positions of the decoder; `max_length` of the files is no limit (it reads 20 in some, 448 in others)."""
        positions = getattr(config.hf_config, "max_target_positions", None)
        return super().max_model_len(config) if positions is None else int(positions)

    @classmethod
    def embedded_model(cls) -> Path | None:
        """The tiny Whisper in this package, which `examples/train_embedded_whisper` makes."""
        return Path(__file__).parent / "embedded_model"

    def tasks(self) -> Mapping[str, Any]:
        """Transcription."""
        return {TRANSCRIPTION: self._transcriber}

    @cached_property
    def _transcriber(self) -> WhisperTranscriber:
        return WhisperTranscriber(self)

    @hookimpl
    def logits_processors(self, config: ModelConfig, vocab_size: int) -> list[LogitsProcessor]:
        """The rules of transcription, for requests that ask for them."""
        self._rules = TranscriptionRules(config, self.tokens, vocab_size)
        return [self._rules]

    @hookimpl
    def custom_sampler(self, sampler: Sampler) -> Sampler:
        """Steps of greedy transcription alone have one kernel to sample."""
        return GreedyTranscription(sampler, self._rules)

    @torch.inference_mode()
    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens_padded, hidden_size] of the batch's flat tokens."""
        return self.norm(self.decoder(self.embed(batch.input_ids, batch.positions)))

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the decoder's layers are given of tokens at positions, [n, hidden_size] of two [n]."""
        x = self._embedding[input_ids]
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        return x + self._position_embedding[positions]

    @torch.inference_mode()
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size or a few more] of hidden states [n, hidden_size]."""
        return linear(hidden_states, self._head)
