"""Log-mel features on the device equal those of transformers' extractor: every length, level and batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from model_states_whisper.features import FeatureConfig, LogMel
from support.encoder_decoder import encoder_runs

from core_runner import LLM, SamplingParams

RATE, NUM_SAMPLES = 16_000, 480_000
# Of one sample, about a hop and about a window of the transform, odd ones, and a whole input and nearly one.
LENGTHS = (1, 159, 160, 161, 399, 400, 401, 31_007, 479_999, 480_000)


def speechlike(num_samples: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    time = np.arange(num_samples) / RATE
    voice = np.sin(2 * np.pi * (110 + seed) * time) * (1 + np.sin(2 * np.pi * 3 * time))
    return (0.2 * voice + 0.02 * random.standard_normal(num_samples)).astype(np.float32)


def odd_clips() -> dict[str, np.ndarray]:
    full = np.ones(20_000, np.float32)
    noise = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    click = np.zeros(20_000, np.float32)
    click[7_777] = 1.0
    return {
        "silence": np.zeros(20_000, np.float32),
        "constant": 0.5 * full,
        "square wave": np.sign(np.sin(np.arange(20_000) / 9.0)).astype(np.float32),
        "click": click,
        "hiss too quiet to hear": 1e-7 * noise,
        "noise as loud as can be": np.clip(3 * noise, -1, 1),
        "highest tone": np.tile(np.float32([1.0, -1.0]), 10_000),
    }


@cache
def extractor(num_mels: int) -> object:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=num_mels)


def expected(clips: list[np.ndarray], num_mels: int) -> torch.Tensor:
    return extractor(num_mels)(clips, sampling_rate=RATE, return_tensors="pt").input_features


def ours(clips: list[np.ndarray], num_mels: int) -> torch.Tensor:
    batch = np.stack([np.pad(clip, (0, NUM_SAMPLES - len(clip))) for clip in clips])
    log_mel = LogMel(FeatureConfig(feature_size=num_mels, num_frames=3000), torch.device("cpu"))
    return log_mel(torch.from_numpy(batch))


@pytest.mark.parametrize("num_mels", [80, 128])
def test_every_length_in_one_batch(num_mels: int) -> None:
    clips = [speechlike(length, seed) for seed, length in enumerate(LENGTHS)]
    features = ours(clips, num_mels)
    assert features.shape == (len(clips), num_mels, 3000)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, expected(clips, num_mels), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_levels_from_silence_to_full(num_mels: int) -> None:
    clips = odd_clips()
    reference = expected(list(clips.values()), num_mels)
    for (name, clip), wanted in zip(clips.items(), reference, strict=True):
        torch.testing.assert_close(
            ours([clip], num_mels)[0],
            wanted,
            rtol=0,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_a_clip_is_the_same_in_any_batch() -> None:
    """The loudest band of one clip is no ceiling for another."""
    clips = list(odd_clips().values())
    alone = torch.cat([ours([clip], 80) for clip in clips])
    torch.testing.assert_close(ours(clips, 80), alone, rtol=0, atol=1e-6)


def test_samples_of_twice_the_precision_are_the_same_audio(speech_llm: Callable[..., LLM]) -> None:
    llm = speech_llm()
    clip = speechlike(5_001, 3)
    before = encoder_runs(llm)
    prompts = [
        {"prompt_token_ids": [3, 9], "model_inputs": {"audio": audio}}
        for audio in (clip, clip.astype(np.float64), torch.from_numpy(clip).double(), clip[::-1][::-1])
    ]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert encoder_runs(llm) == before + 1
