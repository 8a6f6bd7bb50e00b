"""The embedded Whisper on long audio: as transformers' long-form generate, and in parallel windows with true times."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model_states_whisper
import numpy as np
import pytest
import torch
from support.long_audio import assert_same, oracle

from core_runner import LLM
from model_states.speech import Transcript

MODEL = Path(model_states_whisper.__file__).parent / "embedded_model"
SAID: dict[str, str] = json.loads((MODEL / "examples" / "recordings.json").read_text())
RATE = 16000
THRESHOLDS = {
    "compression_ratio_threshold": 2.4,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}
# (begin, end, text)
Spoken = list[tuple[float, float, str]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded:whisper", device="cpu", dtype="float32", max_num_reqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def hf() -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()


def read(name: str) -> np.ndarray:
    with wave.open(str(MODEL / "examples" / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def recording(seconds: float, longest_pause: float, seed: int = 0) -> tuple[np.ndarray, Spoken]:
    """The shipped recordings in random order and loudness, pauses of 0.2 s and more between them, faint noise."""
    draw = np.random.default_rng(seed)
    samples = 3e-4 * draw.standard_normal(round(seconds * RATE)).astype(np.float32)
    spoken: Spoken = []
    place = draw.uniform(0.2, longest_pause)
    while True:
        name = draw.choice(sorted(SAID))
        clip = read(name) * draw.uniform(0.5, 1.2)
        start = round(place * RATE)
        if start + len(clip) > len(samples):
            return samples, spoken
        samples[start : start + len(clip)] += clip
        loud = np.flatnonzero(np.abs(clip) > 0.02)
        spoken.append(((start + loud[0]) / RATE, (start + loud[-1]) / RATE, SAID[name]))
        place += len(clip) / RATE + draw.uniform(0.2, longest_pause)


def assert_complete(transcript: Transcript, spoken: Spoken) -> None:
    """Every word, and each recording's sentences from where it begins to where it ends."""
    assert transcript.text.split() == " ".join(text for _, _, text in spoken).split()
    segments = iter(transcript.segments)
    for begin, end, text in spoken:
        first = last = next(segments)
        said = first.text
        while said.split() != text.split():
            last = next(segments)
            said += last.text
        assert abs(first.start - begin) <= 0.1
        assert abs(last.end - end) <= 0.1


@pytest.mark.parametrize("seconds", [29, 30, 30.01, 61, 305])
def test_sequential_windows_equal_those_of_transformers(llm: LLM, hf: Any, seconds: float) -> None:
    samples, _ = recording(seconds, 1.0, seed=round(seconds))
    expected = oracle(
        hf,
        samples,
        language="en",
        task="transcribe",
        condition_on_prev_tokens=True,
        temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
        **THRESHOLDS,
    )
    (transcript,) = llm.transcribe(samples, language="en", **THRESHOLDS)
    assert {segment.temperature for segment in transcript.segments} == {0.0}, "nothing was drawn"
    assert_same(transcript, expected, hf.generation_config.no_timestamps_token_id + 1)
    assert len(transcript.segments) > seconds / 10


def test_parallel_windows_say_every_word_at_its_time(llm: LLM) -> None:
    """Many recordings at once, in a batch that has room for a few windows."""
    recordings = [
        recording(seconds, pause, seed)
        for seed, (seconds, pause) in enumerate([(4.5, 0.4), (29, 1.0), (61, 4.0), (75, 9.0), (130, 0.5)])
    ]
    steps = llm.stats().steps
    transcripts = llm.transcribe([samples for samples, _ in recordings], windows="parallel")
    in_parallel = llm.stats().steps - steps
    for transcript, (samples, spoken) in zip(transcripts, recordings, strict=True):
        assert_complete(transcript, spoken)
        assert transcript.duration == len(samples) / RATE
        assert transcript.language == "en"
        assert not any(segment.suspect for segment in transcript.segments)
    tokens = sum(len(s.token_ids) for transcript in transcripts for s in transcript.segments)
    assert in_parallel < tokens / 2


def test_sequential_windows_say_every_word_at_its_time(llm: LLM) -> None:
    samples, spoken = recording(61, 1.0, seed=8)
    assert_complete(llm.transcribe(samples)[0], spoken)
