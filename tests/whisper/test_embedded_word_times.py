"""Word timestamps of the embedded Whisper's recordings: words lie where there is sound, where espeak-ng put them."""

from __future__ import annotations

import json
import sys
import wave
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import model_states_whisper
import numpy as np
import pytest
import torch
from model_states_whisper.alignment import token_positions
from model_states_whisper.listening import Listener, Spoken, load_alignment_heads
from model_states_whisper.time_warping import sharpen

from core_runner import LLM
from model_states.speech import Transcript

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(model_states_whisper.__file__).parent / "embedded_model" / "examples"
SAID: dict[str, str] = json.loads((EXAMPLES / "recordings.json").read_text())
RATE = 16_000
LEAD = 0.5  # seconds of silence before a recording


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded:whisper", device="cpu", dtype="float32", max_num_reqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def heard(llm: LLM) -> dict[str, Transcript]:
    """Each recording after some silence, so that times are not those of its own start."""
    audio = [np.pad(_read(name), (round(LEAD * RATE), 0)) for name in SAID]
    found = llm.transcribe(audio, language="en", word_timestamps=True, temperatures=(0.0,))
    return dict(zip(SAID, found, strict=True))


def _read(name: str) -> np.ndarray:
    with wave.open(str(EXAMPLES / name)) as file:
        assert (file.getframerate(), file.getnchannels()) == (RATE, 1)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def _words(transcript: Transcript) -> list[tuple[str, float, float]]:
    """Words as they are written, with their times in the recording: "2" and ":00" are one."""
    words: list[tuple[str, float, float]] = []
    for segment in transcript.segments:
        for word in segment.words or ():
            start, end = word.start - LEAD, word.end - LEAD
            if words and not word.text.startswith(" "):
                words[-1] = (words[-1][0] + word.text, words[-1][1], end)
            else:
                words.append((word.text.strip(), start, end))
    return words


def _pauses(name: str) -> list[tuple[float, float]]:
    """Silence of a fifth of a second or more, in seconds."""
    loud = np.flatnonzero(np.abs(np.pad(_read(name), (1, 1), constant_values=1.0)) > 1e-3)
    gaps = [(a, b) for a, b in pairwise(loud) if b - a > RATE // 5]
    return [(a / RATE, b / RATE) for a, b in gaps]


@pytest.mark.parametrize("name", SAID)
def test_words_are_those_that_are_said_and_lie_where_there_is_sound(
    name: str, heard: dict[str, Transcript]
) -> None:
    words = _words(heard[name])
    assert " ".join(text for text, _, _ in words) == SAID[name]
    pauses = _pauses(name)
    assert len(pauses) == 1 + SAID[name].count(".")
    for text, start, end in words:
        assert 0.05 < end - start < 1.5, text
        for silent_from, silent_to in pauses:
            overlap = min(end, silent_to) - max(start, silent_from)
            assert overlap < 0.15, (text, start, end, silent_from, silent_to)


@pytest.mark.parametrize("name", SAID)
def test_words_lie_where_the_synthesizer_put_them(name: str, heard: dict[str, Transcript]) -> None:
    pytest.importorskip("espeakng_loader")
    sys.path.insert(0, str(ROOT / "examples" / "train_embedded_whisper"))
    try:
        from recordings import GAP, RECORDINGS, find
        from voices import SAMPLING_RATE, TICK, load_espeak
    finally:
        sys.path.pop(0)
    voice, beginnings = RECORDINGS[name]
    expected: list[Any] = []
    position = GAP * TICK
    for sentence in map(find, beginnings):
        spoken = load_espeak().say(sentence, voice)
        spans = [
            ((a + position) / SAMPLING_RATE, (b + position) / SAMPLING_RATE) for a, b in spoken.word_spans
        ]
        expected += zip(sentence.written, spans, strict=True)
        position += len(spoken.audio) + GAP * TICK
    words = _words(heard[name])
    assert [text for text, _, _ in words] == [text for text, _ in expected]
    errors = [abs(start - span[0]) for (_, start, _), (_, span) in zip(words, expected, strict=True)]
    assert np.median(errors) < 0.03, errors
    assert max(errors) < 0.15, errors


@pytest.mark.parametrize("name", SAID)
def test_token_times_equal_transformers(name: str, llm: LLM) -> None:
    """As in `test_word_times`, on the queries that transformers warps."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(EXAMPLES.parent, dtype=torch.float32).eval()
    extract = WhisperFeatureExtractor.from_pretrained(EXAMPLES.parent)
    features = extract(_read(name), sampling_rate=RATE, return_tensors="pt").input_features
    state: Any = llm.engine.runner.model_state
    heads = load_alignment_heads(state.config.checkpoint, len(state.decoder.layers), 3)
    model.generation_config.alignment_heads = [list(head) for head in heads]
    prompt = state.tokens.prompt(language="en", task="transcribe")
    out = model.generate(
        input_features=features,
        decoder_input_ids=torch.tensor([prompt]),
        return_token_timestamps=True,
        return_dict_in_generate=True,
        return_timestamps=False,
    )
    ids = out["sequences"][0].tolist()
    text = [token for token in ids if token < state.tokens.end_id]
    first = ids.index(text[0])
    theirs = out["token_timestamps"][0].tolist()[first : first + len(text)]
    inputs = {"input_features": features[0].numpy()}
    (heard,) = Listener(state).listen(
        [Spoken(prompt=prompt, text=text, model_inputs=inputs, num_positions=state.encoder.max_positions)]
    )
    rows = heard.weights[:, len(prompt) : len(prompt) + len(text)]
    ours = 0.02 * token_positions(sharpen(rows))
    np.testing.assert_allclose(ours, theirs, atol=0.02 + 1e-6)
