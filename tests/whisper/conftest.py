"""A tiny Whisper that the tests share, and engines of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.drained import Drained
from support.encoder_decoder import OPTIONS, SpeechModel, ask

from core_runner import LLM


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return SpeechModel(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def speech_llm(speech: SpeechModel, drained: Drained) -> Callable[..., LLM]:
    """An engine of the tiny model that must give everything back."""
    return lambda **options: drained(speech.directory, probe=ask(99, [3, 5, 6]), **{**OPTIONS, **options})
