"""Long audio on a GPU: programs over recorded steps, features of whole recordings, words from attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_states_whisper.features import FeatureConfig, LogMel
from support.drained import Drained
from support.long_audio import START, WINDOW, LetterTokenizer, audio, save_long_audio_model
from support.whole_steps import ways_since

from core_runner import LLM

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"language": "en", "temperatures": (0.0,), "no_speech_threshold": None}
RECORDINGS = [audio(seed, length) for seed, length in enumerate((WINDOW, 5 * WINDOW + 321, 2 * WINDOW, 700))]


@pytest.fixture
def load(tmp_path: Path, drained: Drained) -> Callable[..., LLM]:
    # Its texts are long, and the same with weights and samples that are noisy from the sixth digit on.
    save_long_audio_model(tmp_path, 2)

    def make(**options: Any) -> LLM:
        probe = {"prompt_token_ids": [START, 5], "model_inputs": {"audio": audio(1, WINDOW)}}
        options = {"dtype": "float32", "block_size": 16, "max_num_reqs": 8, **options}
        llm = drained(str(tmp_path), probe=probe, **options)
        llm.tokenizer = SimpleNamespace(hf=LetterTokenizer(), decode=lambda ids, **_: str(ids))
        return llm

    return make


def test_features_of_a_recording_are_those_of_the_cpu() -> None:
    config = FeatureConfig(feature_size=80, num_frames=3000)
    samples = audio(3, 301 * 16000 + 77)
    ours, cpu = (LogMel(config, torch.device(name)).of_recording(samples) for name in ("cuda", "cpu"))
    np.testing.assert_allclose(ours, cpu, atol=1e-3)


@pytest.mark.parametrize("windows", ["sequential", "parallel"])
def test_transcripts_are_those_of_the_cpu(windows: str, load: Callable[..., LLM]) -> None:
    options = {**OPTIONS, "windows": windows}
    expected = load(device="cpu").transcribe(RECORDINGS, **options)
    llm = load(device="cuda")
    before = llm.stats().step_ways
    for _ in range(2):  # and with every shape recorded
        transcripts = llm.transcribe(RECORDINGS, **options)
        for samples, transcript in zip(RECORDINGS, transcripts, strict=True):
            assert transcript.duration == len(samples) / 16000
            times = [t for s in transcript.segments for t in (s.start, s.end)]
            assert times == sorted(times)
        assert [t.text for t in transcripts] == [t.text for t in expected]
    # The last recording is too short to hold speech for whoever looks for it.
    assert all(transcript.text for transcript in expected[:3])
    # Rules and log-probabilities are a part of the graph, also in the steps that let windows in.
    ways = ways_since(llm, before)
    assert ways["step graph"] > sum(ways.values()) // 2
    assert "forward graph" not in ways


def test_words_have_times(load: Callable[..., LLM]) -> None:
    transcripts = load(device="cuda").transcribe(RECORDINGS, word_timestamps=True, **OPTIONS)
    segments = [segment for transcript in transcripts for segment in transcript.segments]
    assert segments
    for segment in segments:
        times = [t for word in segment.words or () for t in (word.start, word.end)]
        assert times == sorted(times)
        assert not times or segment.start <= times[0] <= times[-1] <= segment.end
