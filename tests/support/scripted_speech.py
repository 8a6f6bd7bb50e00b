"""A transcriber without a model: its programs are answered by a script that hears what each window holds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from model_states_whisper.features import FeatureConfig
from model_states_whisper.tokens import WhisperTokens
from model_states_whisper.transcriber import WhisperTranscriber
from support.long_audio import (
    END,
    ENGLISH,
    FIRST_TIME,
    NO_SPEECH,
    NO_TIMES,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    LetterTokenizer,
)

from model_states.speech import Transcript, TranscriptionOptions
from model_states.tasks import TaskOutput, TaskRequest

RATE = 16000
# Tokens of the decoder's answer, without the end token, and their mean logprob.
Answer = tuple[Sequence[int], float]


def at(seconds: float) -> int:
    """The timestamp of a time in a window."""
    return FIRST_TIME + round(seconds / 0.02)


class ScriptedModel:
    """Answers requests in the order in which they are made; `asked` keeps those of the decoder.

    decode(request) gives tokens and mean logprob; no_speech(request) a probability.
    """

    def __init__(
        self,
        decode: Callable[[TaskRequest], Answer],
        no_speech: Callable[[TaskRequest], float] = lambda _: 0.01,
    ) -> None:
        self._decode, self._no_speech = decode, no_speech
        self.asked: list[TaskRequest] = []
        self.progress: list[float] = []

    def transcribe(self, audio: np.ndarray, **options: Any) -> Transcript:
        transcriber = WhisperTranscriber(_state())
        options = TranscriptionOptions(**{"language": "en", **options})
        program = transcriber.transcribe(audio, options, LetterTokenizer(), self.progress.append)
        result = self._run(program)
        assert self.progress == sorted(self.progress)
        assert not self.progress or abs(self.progress[-1] - len(audio) / RATE) < 1e-6
        return result

    def prompts(self) -> list[list[int]]:
        """Text before each window that was decoded, as it was shown."""
        prompts = [list(request.prompt_token_ids) for request in self.asked]
        return [prompt[1 : prompt.index(START)] if prompt[0] == PREVIOUS else [] for prompt in prompts]

    def _run(self, program: Generator[Sequence[Any], Sequence[Any], Any]) -> Any:
        results = None
        try:
            while True:
                results = [self._answer(item) for item in program.send(results)]
        except StopIteration as stop:
            return stop.value

    def _answer(self, item: Any) -> Any:
        if isinstance(item, Generator):
            return self._run(item)
        if not isinstance(item, TaskRequest):
            return item()
        if item.params["logits_processors"]["whisper"].get("only") == NO_SPEECH:
            assert item.prompt_token_ids[-1] == START
            return TaskOutput([NO_SPEECH], "length", [np.log(self._no_speech(item))])
        self.asked.append(item)
        tokens, logprob = self._decode(item)
        return TaskOutput([*tokens, END], "stop", [logprob] * (len(tokens) + 1))


def _state() -> Any:
    """What a transcriber reads of a model state."""
    tokens = WhisperTokens(
        start_id=START,
        end_id=END,
        no_timestamps_id=NO_TIMES,
        previous_id=PREVIOUS,
        language_ids={"en": ENGLISH},
        task_ids={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        forced_ids=(),
        suppressed_ids=(),
        first_suppressed_ids=(),
        max_initial_timestamp=None,
        max_target_positions=448,
    )
    config = SimpleNamespace(device=torch.device("cpu"), max_model_len=448)
    encoder = SimpleNamespace(features=FeatureConfig(feature_size=8, num_frames=3000))
    return SimpleNamespace(tokens=tokens, vocab_size=FIRST_TIME + 1501, config=config, encoder=encoder)


def loud_stretches(request: TaskRequest) -> list[tuple[float, float]]:
    """Begins and ends, in seconds of the window, of what is loud in it, up to a tenth of a second."""
    inputs = request.model_inputs
    if "audio" in inputs:
        samples = inputs["audio"][: len(inputs["audio"]) // 160 * 160].reshape(-1, 160)
        loud = np.abs(samples).max(axis=1) > 0.1
    else:
        levels = inputs["input_features"].max(axis=0)
        loud = levels > levels.max() - 0.6  # 2.4 of a decade; the rest of the window is far below
        loud &= levels > 0.3
    edges = np.flatnonzero(np.diff(np.concatenate([[False], loud, [False]]))) / 100
    return [(float(start), float(end)) for start, end in edges.reshape(-1, 2)]


def markers(num_samples: int, times: Sequence[float], seconds: float = 0.3) -> np.ndarray:
    """A recording that is quiet but for tones at these times, float32 [num_samples]."""
    draw = np.random.default_rng(0)
    samples = 1e-4 * draw.standard_normal(num_samples)
    tone = 0.5 * np.sin(2 * np.pi * 700 * np.arange(round(seconds * RATE)) / RATE)
    for time in times:
        place = samples[round(time * RATE) :][: len(tone)]
        place += tone[: len(place)]
    return samples.astype(np.float32)
