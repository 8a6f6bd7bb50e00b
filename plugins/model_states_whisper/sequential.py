"""Sequential windows: each begins where the text of the one before ended, and is shown that text.

The algorithm of Radford et al. 2022, section 4.5, as transformers' `generate` runs it over the features of the whole
recording; docs/transcription.md says where the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from model_states.speech import Segment, Transcript
from model_states_whisper.features import FeatureConfig
from model_states_whisper.segment_maker import SegmentMaker
from model_states_whisper.segments import Piece
from model_states_whisper.window_decoder import DecodedWindow, WindowDecoder, WindowInput

_FRAMES_PER_POSITION: Final = 2
_HOTTEST_SHOWN: Final = 0.5


class PreviousText:
    """Tokens that a window is shown as the text before it.

    They begin with those of the initial prompt. Text that is likely wrong is shown to nobody, and nor is what came
    before it: a window that was over a threshold at every temperature, or was decoded at more than 0.5. A window that
    has no text before it is shown the initial prompt.
    """

    def __init__(self, initial: Sequence[int], first_timestamp_id: int, *, is_kept: bool, room: int) -> None:
        """is_kept: False shows every window the initial prompt alone. room: most tokens."""
        self._initial, self._first_timestamp_id = list(initial), first_timestamp_id
        self._is_kept, self._room = is_kept, room
        self._tokens = self._initial

    @property
    def tokens(self) -> Sequence[int]:
        """For the next window."""
        return self._tokens[-self._room :] or self._initial[-self._room :]

    def add(self, window: DecodedWindow, pieces: Sequence[Piece]) -> None:
        """Take in what a window said."""
        if not self._is_kept:
            return
        if window.is_suspect or window.temperature > _HOTTEST_SHOWN:
            self._tokens = []
            return
        shown = [token for piece in pieces for token in self._shown(piece.token_ids)]
        self._tokens = (self._tokens + shown)[-self._room :]

    def _shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Without the second of two timestamps at the end: the next window begins with that itself."""
        is_open = len(token_ids) > 2 and token_ids[-2] >= self._first_timestamp_id
        return token_ids[:-1] if is_open else token_ids


class SequentialWindows:
    """The program of one recording."""

    def __init__(
        self,
        features: npt.NDArray[np.float32],
        config: FeatureConfig,
        decoder: WindowDecoder,
        previous: PreviousText,
        maker: SegmentMaker,
        progress: Callable[[float], None],
    ) -> None:
        """features: [feature_size, frames] of the whole recording."""
        self._features, self._config = features, config
        self._decoder, self._previous, self._maker, self._progress = decoder, previous, maker, progress
        self._name = uuid4().hex
        self._segments: list[Segment] = []

    def run(self, language: str | None) -> Generator[Sequence[Any], Sequence[Any], Transcript]:
        """language: code; None has it detected, where the model knows several."""
        num_frames = self._features.shape[1]
        if language is None and self._decoder.knows_languages:
            language = yield from self._decoder.detect_language(self._inputs(0))
        seek = 0
        while seek < num_frames:
            window = WindowInput(
                model_inputs=self._inputs(seek),
                language=language,
                previous=self._previous.tokens,
                number=seek,
                place=f"the window at {self._seconds(seek):.2f} s",
            )
            decoded = yield from self._decoder.decode(window)
            seek += yield from self._take(decoded, seek, window)
            self._progress(min(self._seconds(seek), self._maker.duration))
        self._progress(self._maker.duration)
        return self._maker.transcript(self._segments, language)

    def _inputs(self, seek: int) -> dict[str, Any]:
        """Frames of the window at `seek`; the encoder fills up with zeros."""
        frames = self._features[:, seek : seek + self._config.num_frames]
        return {"input_features": frames, "key": f"{self._name}/{seek}"}

    def _take(
        self, decoded: DecodedWindow, seek: int, window: WindowInput
    ) -> Generator[Sequence[Any], Sequence[Any], int]:
        """Keep what the window at `seek` says; gives the frames that are done with."""
        num_frames: int = min(self._config.num_frames, self._features.shape[1] - seek)
        if decoded.is_silent:
            return num_frames
        pieces, is_open = self._decoder.split(decoded.token_ids, num_frames // _FRAMES_PER_POSITION)
        hop_length, prompt = self._config.hop_length, self._decoder.prompt(window.language, timestamps=False)
        self._segments += yield from self._maker.run(
            seek * hop_length, num_frames * hop_length, pieces, decoded, window, prompt
        )
        self._previous.add(decoded, pieces)
        said = _FRAMES_PER_POSITION * pieces[-1].end
        return said if is_open and said > 0 else num_frames

    def _seconds(self, frame: int) -> float:
        return frame * self._config.hop_length / self._config.sampling_rate
