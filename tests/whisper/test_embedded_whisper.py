"""The embedded Whisper: its recordings are transcribed exactly, here and by transformers, at any length."""

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
from model_states_whisper.state import WhisperState

from core_runner import LLM, RequestError, SamplingParams

MODEL = Path(model_states_whisper.__file__).parent / "embedded_model"
EXAMPLES = MODEL / "examples"
SAID: dict[str, str] = json.loads((EXAMPLES / "recordings.json").read_text())
RATE, WINDOW = 16_000, 480_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=220)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded:whisper", device="cpu", dtype="float32", max_num_reqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def hf() -> tuple[Any, Any]:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    model = WhisperForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    return model, WhisperProcessor.from_pretrained(MODEL)


def read(name: str) -> np.ndarray:
    with wave.open(str(EXAMPLES / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def speech_of(seconds: float) -> tuple[np.ndarray, list[str]]:
    """The recordings over and over, with pauses of changing length, and silence after the last that fits."""
    parts, texts, room = [], [], round(seconds * RATE)
    while True:
        name = sorted(SAID)[len(texts) % len(SAID)]
        pause = np.zeros(RATE // 10 * (1 + len(texts) % 7), np.float32)
        room -= len(pause) + len(read(name))
        if room < 0:
            break
        parts += [pause, read(name)]
        texts.append(SAID[name])
    audio = np.concatenate(parts)
    return np.pad(audio, (0, round(seconds * RATE) - len(audio))), texts


@torch.inference_mode()
def by_transformers(hf: tuple[Any, Any], audio: np.ndarray, **options: Any) -> list[int]:
    """Token ids of a recording, as `generate` gives them."""
    model, processor = hf
    long = {"truncation": False, "padding": "longest"} if len(audio) > WINDOW else {}
    inputs = processor(audio, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **long)
    return list(model.generate(**inputs, **options)[0].tolist())


def test_files_are_small_and_say_what_they_are() -> None:
    assert WhisperState.embedded_model() == MODEL
    assert (MODEL / "model.safetensors").stat().st_size < 8e6
    card = (MODEL / "README.md").read_text()
    assert "**It does not understand people.**" in card
    for name, text in SAID.items():
        assert (EXAMPLES / name).stat().st_size < 150_000
        assert text in card
        with wave.open(str(EXAMPLES / name)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)


def test_it_is_no_default_of_text_and_the_default_of_transcription() -> None:
    from model_states import PluginManager
    from model_states.tasks import TRANSCRIPTION

    plugins = PluginManager()
    assert plugins.default_embedded_model() != MODEL
    assert plugins.embedded_for_task(TRANSCRIPTION)[0] == "embedded:whisper"
    assert plugins.embedded_model("whisper") == MODEL


@pytest.mark.parametrize("name", sorted(SAID))
@pytest.mark.parametrize("timestamps", [False, True])
def test_recordings_are_transcribed_exactly(
    llm: LLM, hf: tuple[Any, Any], name: str, timestamps: bool
) -> None:
    tokens = model_states_whisper.WhisperTokens.load(str(MODEL))
    prompt = tokens.prompt(language="en", timestamps=timestamps)
    params = SamplingParams(
        temperature=0.0, max_tokens=220, logits_processors={"whisper": {"timestamps": timestamps}}
    )
    request = {"prompt_token_ids": prompt, "model_inputs": {"audio": read(name)}}
    ours = [int(token) for token in llm.generate(request, params)[0].outputs[0].token_ids]
    theirs = by_transformers(hf, read(name), return_timestamps=timestamps)
    tokenizer = hf[1].tokenizer
    for ids in (ours, theirs):
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == SAID[name]
    if not timestamps:  # with them, transformers leaves some out where windows meet
        assert [i for i in ours if i < tokens.end_id] == [i for i in theirs if i < tokens.end_id]


@pytest.mark.parametrize("seconds", [30.01, 61.0])
def test_long_audio_is_transcribed_exactly_and_as_transformers_does(
    llm: LLM, hf: tuple[Any, Any], seconds: float
) -> None:
    audio, texts = speech_of(seconds)
    transcript = llm.transcribe(audio, condition_on_previous_text=False, temperatures=(0.0,))[0]
    assert transcript.text.split() == " ".join(texts).split()
    theirs = by_transformers(hf, audio, return_timestamps=True)
    assert hf[1].tokenizer.decode(theirs, skip_special_tokens=True).split() == transcript.text.split()
    times = [time for segment in transcript.segments for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert times[-1] <= transcript.duration == pytest.approx(seconds, abs=1e-3)
    loud = np.abs(audio).reshape(-1, 80).max(1) > 0.02  # by 5 ms
    for segment in transcript.segments:  # each begins and ends where sound does
        first, last = round(segment.start * 200), round(segment.end * 200)
        assert loud[first : first + 20].any()
        assert loud[last - 30 : last].any()
        assert not loud[max(0, first - 12) : max(0, first - 4)].any()


def test_an_empty_language_is_refused_and_not_taken_for_the_first_one(llm: LLM) -> None:
    with pytest.raises(RequestError, match="language='' is not one of this model's: en"):
        llm.transcribe(read("lights.wav"), language="")


def test_nothing_is_said_in_silence(llm: LLM) -> None:
    noise = np.random.default_rng(0).standard_normal(5 * RATE).astype(np.float32)
    for audio in (np.zeros(5 * RATE, np.float32), 0.01 * noise):
        transcript = llm.transcribe(audio)[0]
        assert transcript.text.strip() == ""
        assert all(segment.no_speech_prob > 0.6 for segment in transcript.segments)


def test_alignment_heads_follow_the_words(hf: tuple[Any, Any]) -> None:
    """The words of a recording, found by transformers' time warping, share its speech out in their order."""
    model, processor = hf
    audio = read("alarm.wav")
    inputs = processor(audio, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    attention = model.config._attn_implementation
    with torch.inference_mode():
        out = model.generate(
            **inputs, return_timestamps=True, return_token_timestamps=True, return_segments=True
        )
    model.set_attn_implementation(attention)
    (segment,) = out["segments"][0]
    words = processor.tokenizer.convert_ids_to_tokens(segment["tokens"].tolist())
    starts = [
        before
        for word, before in zip(words[1:], segment["token_timestamps"].tolist(), strict=False)
        if word[0] == "Ġ"
    ]
    assert starts == sorted(starts)
    assert len(starts) == len(SAID["alarm.wav"].split())
    gaps = np.diff([*starts, float(segment["end"])])
    assert (gaps > 0.05).all()
    assert (gaps < 1.0).all()
