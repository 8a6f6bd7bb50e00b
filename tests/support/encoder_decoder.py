"""Tiny random encoder-decoder models, and transformers' generate on one input as their oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.reference import Reference

from core_runner import LLM

NUM_MELS, NUM_FRAMES, VOCAB_SIZE = 8, 40, 211
OPTIONS = {"device": "cpu", "block_size": 4, "max_num_reqs": 4, "max_num_batched_tokens": 24}
_SIZES = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": VOCAB_SIZE,
    # Large enough that logits differ by more than the margin rule's 1e-3 nearly everywhere.
    "init_std": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}


def save_speech_model(
    directory: Path, max_target_positions: int = 64, sizes: Mapping[str, Any] | None = None, **generation: Any
) -> Any:
    """A Whisper of two layers; generation: fields of its generation config."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        num_mel_bins=NUM_MELS,
        max_source_positions=NUM_FRAMES // 2,
        max_target_positions=max_target_positions,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **{**_SIZES, **(sizes or {})},
    )
    return _save(WhisperForConditionalGeneration, config, directory, generation)


def save_text_model(directory: Path, **generation: Any) -> Any:
    """A BART of two layers, which reads up to 32 tokens."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(max_position_embeddings=32, forced_eos_token_id=None, **_SIZES)
    return _save(BartForConditionalGeneration, config, directory, generation)


def _save(model_class: Any, config: Any, directory: Path, generation: Mapping[str, Any]) -> Any:
    torch.manual_seed(len(directory.name) + 11)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases start at ones and zeros, where a lost one would not show.
            if parameter.dim() <= 1:
                parameter += 0.1 * torch.randn(parameter.shape)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias += 0.5 * torch.randn(model.final_logits_bias.shape)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(directory)
    return model


def features(seed: int, num_frames: int = NUM_FRAMES) -> np.ndarray:
    """Log-mel features of nothing in particular, float32 [NUM_MELS, num_frames]."""
    return np.random.default_rng(seed).standard_normal((NUM_MELS, num_frames), dtype=np.float32)


@torch.no_grad()
def reference(
    model: Any, prompt: Sequence[int], max_tokens: int, processors: Sequence[Any] = (), **encoder_input: Any
) -> Reference:
    """Greedy tokens of one prompt by transformers' plain generate, with the logits before `processors`."""
    from transformers import GenerationMixin, LogitsProcessorList

    ids = torch.tensor([list(prompt)])
    out = GenerationMixin.generate(
        model,
        decoder_input_ids=ids,
        logits_processor=LogitsProcessorList(processors),
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **encoder_input,
    )
    logits = torch.cat(out.logits).float()
    return Reference(out.sequences[0, len(prompt) :].tolist(), torch.log_softmax(logits, -1))


def encoder_runs(llm: LLM) -> int:
    """Inputs that the encoder has run on."""
    return llm.engine.runner.model_state.cross_attention.runs.num_encoded


class SpeechModel:
    """A tiny checkpoint; a reference is computed once for each seed of features, prompt and length."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.model: Any = save_speech_model(directory)
        self._reference = cache(self._compute)

    def reference(self, seed: int, prompt: Sequence[int], max_tokens: int) -> Reference:
        return self._reference(seed, tuple(prompt), max_tokens)

    def _compute(self, seed: int, prompt: tuple[int, ...], max_tokens: int) -> Reference:
        return reference(
            self.model, prompt, max_tokens, input_features=torch.from_numpy(features(seed))[None]
        )


def ask(seed: int, prompt: Sequence[int]) -> dict[str, Any]:
    """A prompt about the audio of `seed`."""
    return {"prompt_token_ids": list(prompt), "model_inputs": {"input_features": features(seed)}}
