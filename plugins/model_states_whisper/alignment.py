"""Times of words: the text of a window goes through the decoder once more, and its heads say what it listened to.

The algorithm is that of the reference implementation of Radford et al. 2022 (whisper/timing.py): the decoder is given
the prompt, the text without timestamps and the end token; the attention of the heads that follow the audio is warped
into a path (see `time_warping`), and tokens become words (see `words`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from model_states.speech import Segment, Word
from model_states_whisper.listening import Listener, Spoken
from model_states_whisper.time_warping import sharpen, warp
from model_states_whisper.words import (
    SpokenWord,
    cut_after_pause,
    cut_at_sentences,
    join_punctuation,
    keep_within,
    split_words,
    usual_duration,
)

if TYPE_CHECKING:
    from model_states_whisper.state import WhisperState


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedWindow:
    """A window whose segments are known.

    segments: in order, with times of the whole audio; of their tokens those of text count. prompt: what comes before
    text without timestamps (`WhisperTokens.prompt`). model_inputs: what the window was decoded from. start, duration:
    where the window begins in the audio and how much of it is audio, in seconds. language: code.
    """

    segments: Sequence[Segment]
    prompt: Sequence[int]
    model_inputs: Mapping[str, Any]
    start: float
    duration: float
    language: str | None


class WordAligner:
    """Finds when the words of decoded windows are spoken."""

    def __init__(self, state: WhisperState) -> None:
        """Raises `CheckpointError` where the checkpoint names attention heads that it does not have."""
        self._listener, self._end_id = Listener(state), state.tokens.end_id
        features = state.encoder.features
        self._num_positions = state.encoder.max_positions
        self._seconds = 2 * features.hop_length / features.sampling_rate  # of a position

    def find_words(self, windows: Sequence[AlignedWindow], tokenizer: Any) -> list[list[list[Word]]]:
        """Words of each segment of each window; their texts together are the segment's.

        Times are in seconds of the whole audio, never decrease, and lie within the segment and the window. tokenizer:
        transformers'.
        """
        texts = [[self._text_of(segment) for segment in window.segments] for window in windows]
        said = [row for row, of_window in enumerate(texts) if any(of_window)]
        spoken = [self._describe(windows[row], [*chain(*texts[row])]) for row in said]
        words: list[list[list[Word]]] = [[[] for _ in window.segments] for window in windows]
        for row, one, heard in zip(said, spoken, self._listener.listen(spoken), strict=True):
            positions = token_positions(heard.weights, len(one.prompt), len(one.text))
            times = [windows[row].start + self._seconds * int(position) for position in positions]
            found = _split_segments(tokenizer, texts[row], windows[row].language, times, heard.probabilities)
            words[row] = _finish(found, windows[row])
        return words

    def _text_of(self, segment: Segment) -> list[int]:
        return [token for token in segment.token_ids if token < self._end_id]

    def _describe(self, window: AlignedWindow, text: Sequence[int]) -> Spoken:
        num_positions = min(max(int(round(window.duration / self._seconds, 3)), 1), self._num_positions)
        return Spoken(
            prompt=window.prompt, text=text, model_inputs=window.model_inputs, num_positions=num_positions
        )


def token_positions(weights: torch.Tensor, prompt_len: int, text_len: int) -> npt.NDArray[np.int64]:
    """First position of each token of a text, and the one behind its last, [text_len + 1].

    weights: as in `Listening`. What counts is how a token attends while it predicts the next: the last token of the
    prompt the first of the text, and the last of the text the end.
    """
    rows = slice(prompt_len - 1, prompt_len + text_len)
    return warp(sharpen(weights)[rows].cpu().numpy())


def _split_segments(
    tokenizer: Any,
    texts: Sequence[Sequence[int]],
    language: str | None,
    times: Sequence[float],
    probabilities: npt.NDArray[np.float32],
) -> list[list[SpokenWord]]:
    """Words of each segment; times [n + 1] and probabilities [n] are those of all their tokens."""
    segments, first = [], 0
    for text in texts:
        words = []
        for piece, count in split_words(tokenizer, text, language):
            end = first + count
            values = tuple(map(float, probabilities[first:end]))
            words.append(SpokenWord(piece, times[first], times[end], values))
            first = end
        segments.append(words)
    return segments


def _finish(segments: Sequence[Sequence[SpokenWord]], window: AlignedWindow) -> list[list[Word]]:
    """Words with their punctuation, cut to what is plausible and to the segments' times."""
    every = [word for words in segments for word in words]
    usual, spoken_until = usual_duration(every), window.start
    cut_at_sentences(every, usual)
    result = []
    for words, segment in zip(segments, window.segments, strict=True):
        joined = join_punctuation(words)
        cut_after_pause(joined, spoken_until, usual)
        keep_within(joined, max(segment.start, spoken_until), segment.end)
        spoken_until = joined[-1].end if joined else spoken_until
        result.append([_as_word(word) for word in joined])
    return result


def _as_word(word: SpokenWord) -> Word:
    probability = sum(word.token_probabilities) / len(word.token_probabilities)
    return Word(text=word.text, start=word.start, end=word.end, probability=probability)
