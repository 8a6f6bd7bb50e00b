"""A tiny random Whisper with the token layout of the real ones, and transformers' long-form generate as its oracle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_states.speech import Transcript

END, START, ENGLISH, GERMAN, TRANSCRIBE, TRANSLATE, PREVIOUS, NO_SPEECH, NO_TIMES = range(150, 159)
FIRST_TIME = NO_TIMES + 1
NUM_MELS, WINDOW_FRAMES, RATE, HOP = 8, 40, 16000, 160
WINDOW = WINDOW_FRAMES * HOP  # samples


def save_long_audio_model(
    directory: Path, seed: int, *, window_frames: int = WINDOW_FRAMES, **generation: Any
) -> Any:
    """Windows of 0.4 s, if not told otherwise, 64 positions; generation: further fields of its generation config."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=FIRST_TIME + window_frames // 2 + 1,
        num_mel_bins=NUM_MELS,
        max_source_positions=window_frames // 2,
        max_target_positions=64,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        # Large enough that logits differ by more than the margin rule's 1e-3 nearly everywhere.
        init_std=0.25,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config).eval()
    fields = {
        "no_timestamps_token_id": NO_TIMES,
        "prev_sot_token_id": PREVIOUS,
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "is_multilingual": True,
        "suppress_tokens": [5, 9, *range(START, NO_TIMES)],
        "begin_suppress_tokens": [7, END],
        "max_initial_timestamp_index": 10,
        "max_length": 64,
        **generation,
    }
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(directory)
    return model


class LetterTokenizer:
    """Words of two letters, one for each id below `END`."""

    @staticmethod
    def decode(ids: Sequence[int], **_: Any) -> str:
        return "".join(f" {chr(97 + i // 26)}{chr(97 + i % 26)}" for i in ids)

    @staticmethod
    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [26 * (ord(word[0]) - 97) + ord(word[1]) - 97 for word in text.split()]


def audio(seed: int, num_samples: int) -> np.ndarray:
    """Noise whose loudness and colour change ten times a second, float32 [num_samples]."""
    draw = np.random.default_rng(seed)
    pieces = []
    for _ in range(-(-num_samples // 1600)):
        t = np.arange(1600) / RATE
        tone = np.sin(2 * np.pi * draw.uniform(100, 5000) * t)
        pieces.append(draw.uniform(0.01, 0.5) * (tone + 0.3 * draw.standard_normal(1600)))
    return np.concatenate(pieces)[:num_samples].astype(np.float32)


def whole_features(model: Any, samples: np.ndarray) -> torch.Tensor:
    """What transformers' extractor makes of a recording of any length, float32 [1, bands, frames]."""
    from transformers import WhisperFeatureExtractor

    config = model.config
    seconds = config.max_source_positions * 2 * HOP / RATE
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=int(seconds) or 1)
    features: torch.Tensor = extractor(
        samples, sampling_rate=RATE, truncation=False, padding="longest", return_tensors="pt"
    ).input_features
    return features


@dataclass(frozen=True)
class OracleSegment:
    """A segment of transformers: times in seconds, tokens, and what the window that it is of was generated as."""

    start: float
    end: float
    token_ids: list[int]
    result: Any


@torch.no_grad()
def oracle(model: Any, samples: np.ndarray, **options: Any) -> list[OracleSegment]:
    """Segments with text, by transformers' sequential long-form generate."""
    out = copy.deepcopy(model).generate(  # which keeps what it was called with in its generation config
        whole_features(model, samples), return_timestamps=True, return_segments=True, **options
    )
    segments = [
        OracleSegment(float(s["start"]), float(s["end"]), s["tokens"].tolist(), s["result"])
        for s in out["segments"][0]
    ]
    end = model.generation_config.eos_token_id
    return [segment for segment in segments if any(token < end for token in segment.token_ids)]


def assert_same(
    transcript: Transcript, expected: Sequence[OracleSegment], first_time: int = FIRST_TIME
) -> None:
    """Segment by segment and token by token; times too, but for windows whose text is in no pair of timestamps.

    There transformers takes the window's begin for that of the text, although the first token says it, and that token
    for its end where no other is.
    """
    assert [list(s.token_ids) for s in transcript.segments] == [s.token_ids for s in expected]
    for segment, wanted in zip(transcript.segments, expected, strict=True):
        end = wanted.end
        if sum(token >= first_time for token in wanted.token_ids) < 2:
            continue
        assert segment.end == pytest.approx(min(end, transcript.duration), abs=1e-6)
        spoken_from = (wanted.token_ids[0] - first_time) * 0.02
        starts = [min(start, transcript.duration) for start in (wanted.start, wanted.start + spoken_from)]
        assert any(segment.start == pytest.approx(start, abs=1e-6) for start in starts)
