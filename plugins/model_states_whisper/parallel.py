"""Parallel windows: a recording is cut at quiet points first, and all its windows are decoded at the same time.

A window may hold more than the model says at once. Then what follows its last timestamp is a window of its own, as long
as there is speech in it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from model_states.speech import Segment, Transcript
from model_states_whisper.activity import SpeechMap, map_speech
from model_states_whisper.features import FeatureConfig
from model_states_whisper.segment_maker import SegmentMaker
from model_states_whisper.window_decoder import WindowDecoder, WindowInput

_MISSED: Final = 0.25  # seconds of speech behind the last timestamp that are worth another window
_TRAILING: Final = 0.2  # seconds that a timestamp may be early

Steps = Generator[Sequence[Any], Sequence[Any], Any]


class ParallelWindows:
    """The program of one recording. Beside its samples little is held: features are made of each window."""

    def __init__(
        self,
        audio: npt.NDArray[np.float32],
        config: FeatureConfig,
        decoder: WindowDecoder,
        initial: Sequence[int],
        maker: SegmentMaker,
        progress: Callable[[float], None],
    ) -> None:
        """initial: tokens that every window is shown as the text before it."""
        self._audio, self._config, self._decoder = audio, config, decoder
        self._initial, self._maker, self._progress = initial, maker, progress
        self._name = uuid4().hex
        self._position = 2 * config.hop_length  # samples
        self._trailing = round(_TRAILING * config.sampling_rate)
        self._num_done = 0  # samples

    def run(self, language: str | None) -> Generator[Sequence[Any], Sequence[Any], Transcript]:
        """language: code; None has it detected in the first window with speech, where the model knows several."""
        config = self._config
        (speech,) = yield [partial(map_speech, self._audio, config.sampling_rate, config.num_samples)]
        windows = speech.windows
        if windows and language is None and self._decoder.knows_languages:
            language = yield from self._decoder.detect_language(self._inputs(*windows[0]))
        self._note(len(self._audio) - sum(end - start for start, end in windows))
        found = yield [self._window(start, end, language, speech) for start, end in windows]
        segments = [segment for of_window in found for segment in of_window]
        return self._maker.transcript(segments, language)

    def _window(self, start: int, end: int, language: str | None, speech: SpeechMap) -> Steps:
        """Segments of the samples [start, end)."""
        segments: list[Segment] = []
        while True:
            window = WindowInput(
                model_inputs=self._inputs(start, end),
                language=language,
                previous=self._initial,
                number=start,
                place=f"the window at {start / self._config.sampling_rate:.2f} s",
            )
            decoded = yield from self._decoder.decode(window)
            if decoded.is_silent:
                break
            pieces, _ = self._decoder.split(decoded.token_ids, (end - start) // self._position)
            prompt = self._decoder.prompt(language, timestamps=False)
            segments += yield from self._maker.run(start, end - start, pieces, decoded, window, prompt)
            said = pieces[-1].end * self._position
            if not said or speech.seconds(start + said + self._trailing, end) < _MISSED:
                break
            self._note(said)
            start += said
        self._note(end - start)
        return segments

    def _inputs(self, start: int, end: int) -> dict[str, Any]:
        """The encoder fills up with silence."""
        return {"audio": self._audio[start:end], "key": f"{self._name}/{start}/{end}"}

    def _note(self, num_samples: int) -> None:
        self._num_done += num_samples
        self._progress(self._num_done / self._config.sampling_rate)
