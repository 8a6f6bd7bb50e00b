"""Times of words: the text of a window goes through the decoder once more, and its heads say what it listened to.

The algorithm is that of the reference implementation of Radford et al. 2022 (whisper/timing.py): the decoder is given
the prompt, the text without timestamps and the end token; the attention of the heads that follow the audio is warped
into a path (see `time_warping`), and tokens become words (see `words`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

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


class HeardWindow(NamedTuple):
    """What came of a window's text, for the host: see `token_positions`. probabilities: of its tokens, float32 [n]."""

    attention: torch.Tensor
    probabilities: torch.Tensor
    done: torch.cuda.Event | None  # None is done


class WordAligner:
    """Finds when the words of decoded windows are spoken.

    `listen` launches the device's part and waits for nothing; it is called between the steps of the engine, by whoever
    makes them. `find_words` is the host's part, which takes longer and may as well run in another thread.
    """

    def __init__(self, state: WhisperState) -> None:
        """Raises `CheckpointError` where the checkpoint names attention heads that it does not have."""
        self._listener, self._end_id = Listener(state), state.tokens.end_id
        features = state.encoder.features
        self._num_positions = state.encoder.max_positions
        self._seconds = 2 * features.hop_length / features.sampling_rate  # of a position

    @torch.inference_mode()
    def listen(self, windows: Sequence[AlignedWindow]) -> list[HeardWindow | None]:
        """What `find_words` wants of each window; None of those without text."""
        texts = [self._text_of(window) for window in windows]
        spoken = [self._describe(window, text) for window, text in zip(windows, texts, strict=True) if text]
        heard: Iterator[HeardWindow] = (
            _to_host(_text_attention(listening.weights, one), listening.probabilities)
            for one, listening in zip(spoken, self._listener.listen(spoken), strict=True)
        )
        return [next(heard) if text else None for text in texts]

    def add_words(
        self, window: AlignedWindow, tokenizer: Any
    ) -> Generator[Sequence[Any], Sequence[Any], list[Segment]]:
        """Part of a program (see `model_states.tasks`): the window's segments with their words."""
        heard = self.listen([window])
        ((found,),) = yield [partial(self.find_words, [window], heard, tokenizer)]
        return [
            replace(segment, words=tuple(words))
            for segment, words in zip(window.segments, found, strict=True)
        ]

    def find_words(
        self, windows: Sequence[AlignedWindow], heard: Sequence[HeardWindow | None], tokenizer: Any
    ) -> list[list[list[Word]]]:
        """Words of each segment of each window; their texts together are the segment's.

        Times are in seconds of the whole audio, never decrease, and lie within the segment and the window. tokenizer:
        transformers'.
        """
        return [
            [[] for _ in window.segments] if one is None else self._find_words(window, one, tokenizer)
            for window, one in zip(windows, heard, strict=True)
        ]

    def _find_words(self, window: AlignedWindow, heard: HeardWindow, tokenizer: Any) -> list[list[Word]]:
        if heard.done is not None:
            heard.done.synchronize()
        positions = token_positions(heard.attention)
        times = [window.start + self._seconds * int(position) for position in positions]
        tokens = iter(zip(pairwise(times), heard.probabilities.tolist(), strict=True))
        segments = []
        for segment in window.segments:
            pieces = split_words(tokenizer, self._text_tokens(segment), window.language)
            segments.append([_spoken_word(text, [*islice(tokens, count)]) for text, count in pieces])
        return _finish(segments, window)

    def _text_of(self, window: AlignedWindow) -> list[int]:
        return [token for segment in window.segments for token in self._text_tokens(segment)]

    def _text_tokens(self, segment: Segment) -> list[int]:
        return [token for token in segment.token_ids if token < self._end_id]

    def _describe(self, window: AlignedWindow, text: Sequence[int]) -> Spoken:
        num_positions = min(max(int(round(window.duration / self._seconds, 3)), 1), self._num_positions)
        return Spoken(
            prompt=window.prompt, text=text, model_inputs=window.model_inputs, num_positions=num_positions
        )


def _text_attention(weights: torch.Tensor, one: Spoken) -> torch.Tensor:
    """Sharpened attention [n + 1, positions] of tokens while they predict the text and the end behind it."""
    first = len(one.prompt) - 1
    return sharpen(weights)[first : first + len(one.text) + 1]


def _to_host(attention: torch.Tensor, probabilities: torch.Tensor) -> HeardWindow:
    if not attention.is_cuda:
        return HeardWindow(attention, probabilities, None)
    attention, probabilities = (x.to("cpu", non_blocking=True) for x in (attention, probabilities))
    done = torch.cuda.Event()
    done.record()
    return HeardWindow(attention, probabilities, done)


def token_positions(attention: torch.Tensor) -> npt.NDArray[np.int64]:
    """First position of each token of a text, and the one behind its last, [n + 1] of attention [n + 1, positions]."""
    return warp(attention.numpy())


def _spoken_word(text: str, tokens: Sequence[tuple[tuple[float, float], float]]) -> SpokenWord:
    """A word of tokens: ((start, end), probability) of each."""
    spans, probabilities = zip(*tokens, strict=True)
    return SpokenWord(text, spans[0][0], spans[-1][1], probabilities)


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
