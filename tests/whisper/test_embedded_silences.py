"""The embedded Whisper and silence: none is heard as words, and no speech before, between or after it is lost."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from pathlib import Path

import model_states_whisper
import numpy as np
import pytest

from core_runner import LLM
from model_states.speech import Transcript

EXAMPLES = Path(model_states_whisper.__file__).parent / "embedded_model" / "examples"
SAID: dict[str, str] = json.loads((EXAMPLES / "recordings.json").read_text())
RATE = 16_000
BOTH = pytest.mark.parametrize("windows", ["sequential", "parallel"])
# What there is where nobody speaks: root mean square of white noise, full scale being 1.
QUIET = pytest.mark.parametrize("level", [0.0, 1e-3], ids=["zeros", "-60 dB"])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded:whisper", device="cpu", dtype="float32", max_num_reqs=8) as llm:
        yield llm


def read(name: str) -> np.ndarray:
    with wave.open(str(EXAMPLES / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def quiet(seconds: float, level: float) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(round(seconds * RATE)).astype(np.float32)
    return np.float32(level) * noise


def ten_seconds() -> np.ndarray:
    """Both recordings in 10 s, the rest of which is zeros."""
    audio = np.concatenate([np.zeros(RATE, np.float32), read("lights.wav"), quiet(0.5, 0), read("alarm.wav")])
    return np.pad(audio, (0, 10 * RATE - len(audio)))


def assert_says(transcript: Transcript, *names: str) -> None:
    """All that is said in recordings, and nothing of it is marked."""
    assert transcript.text.split() == " ".join(SAID[name] for name in names).split()
    assert not any(segment.suspect for segment in transcript.segments)


@BOTH
@pytest.mark.parametrize("level", [0.0, 1e-3, 1e-2], ids=["zeros", "-60 dB", "-40 dB"])
def test_thirty_seconds_without_speech_give_no_text(llm: LLM, windows: str, level: float) -> None:
    (transcript,) = llm.transcribe(quiet(30, level), windows=windows)
    assert transcript.text == ""


@BOTH
@QUIET
def test_speech_on_both_sides_of_a_minute_stays(llm: LLM, windows: str, level: float) -> None:
    ten = ten_seconds()
    (transcript,) = llm.transcribe(np.concatenate([ten, quiet(50, level), ten]), windows=windows)
    assert_says(transcript, "lights.wav", "alarm.wav", "lights.wav", "alarm.wav")
    assert all(s.end <= 10 or s.start >= 60 for s in transcript.segments)


@QUIET
@pytest.mark.parametrize("name", sorted(SAID))
def test_speech_may_begin_late_in_a_window(llm: LLM, name: str, level: float) -> None:
    leads = (3.0, 6.5, 7.0, 8.0, 9.0, 10.0, 15.0, 20.0, 25.0)
    audio = [np.concatenate([quiet(lead, level), read(name)]) for lead in leads]
    for lead, transcript in zip(leads, llm.transcribe(audio), strict=True):
        assert_says(transcript, name)
        assert transcript.segments[0].start == pytest.approx(lead + 0.3, abs=0.15)


@BOTH
@QUIET
def test_speech_after_a_pause_in_a_window_stays(llm: LLM, windows: str, level: float) -> None:
    pauses = (2.0, 7.0, 9.0, 12.0, 15.0, 20.0)
    audio = [
        np.concatenate([quiet(0.5, 0), read("lights.wav"), quiet(pause, level), read("alarm.wav")])
        for pause in pauses
    ]
    for transcript in llm.transcribe(audio, windows=windows):
        assert_says(transcript, "lights.wav", "alarm.wav")


def test_parallel_windows_begin_where_speech_does(llm: LLM) -> None:
    """Windows of 30 s from the start would cut the first sentence."""
    leads = (27.5, 28.5, 29.5, 31.0)
    audio = [np.concatenate([quiet(lead, 0), ten_seconds()[RATE:]]) for lead in leads]
    for lead, transcript in zip(leads, llm.transcribe(audio, windows="parallel"), strict=True):
        assert_says(transcript, "lights.wav", "alarm.wav")
        assert transcript.segments[0].start == pytest.approx(lead + 0.3, abs=0.15)
