"""Spoken sentences with their tokens and places, made in chunks by worker processes.

Time is counted in ticks of 20 ms: a position of the encoder, a step of the timestamps, 441 samples of espeak-ng's
22,050 Hz and 320 of the model's 16,000 Hz. A clip starts at a tick, so nothing has to be rounded later.
"""

import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import numpy as np
from sentences import Sentence, sentences
from tokenizers import Tokenizer
from voices import TICK, Spoken, Voice, load_espeak

CHUNK_TICKS, MAX_CLIPS, MAX_TOKENS = 30_000, 512, 32
CLIPS_PER_VOICE = 12
_LEVEL, _PEAK = 2500.0, 32000.0  # of a clip: root mean square, unless that drives it beyond the peak


class Clip(NamedTuple):
    """A spoken sentence: int16 samples, whole ticks of them; its tokens; where each starts and ends, in ticks."""

    audio: np.ndarray
    tokens: list[int]
    spans: list[tuple[int, int]]
    text: str
    word_spans: list[tuple[float, float]]

    @property
    def ticks(self) -> int:
        """Length in ticks."""
        return len(self.audio) // TICK


class Chunk(NamedTuple):
    """Clips side by side, in few and large arrays: numpy's where they are made, torch's on a device.

    audio: int16 [CHUNK_TICKS * TICK]. frame_tokens: int16 [CHUNK_TICKS], the token that is spoken in a tick, plus one,
    or zero. Of each clip: starts, ticks, counts (tokens) int32 [MAX_CLIPS]; tokens int16 [MAX_CLIPS, MAX_TOKENS]; spans
    int16 [MAX_CLIPS, MAX_TOKENS, 2], in ticks from its start. Only the first num_clips rows are clips.
    """

    audio: Any
    frame_tokens: Any
    starts: Any
    ticks: Any
    counts: Any
    tokens: Any
    spans: Any
    num_clips: int


def make_clip(sentence: Sentence, spoken: Spoken, tokenizer: Tokenizer, offset: int = 0) -> Clip:
    """Put tokens and places together; offset: samples of silence before the speech, less than a tick."""
    num_ticks = -(-(offset + len(spoken.audio)) // TICK)
    audio = np.zeros(num_ticks * TICK, np.int16)
    audio[offset : offset + len(spoken.audio)] = spoken.audio * _gain(spoken.audio)
    word_spans = [((start + offset) / TICK, (end + offset) / TICK) for start, end in spoken.word_spans]
    text = " " + sentence.text
    encoded = tokenizer.encode(text, add_special_tokens=False)
    bounds = _letter_times(sentence.written, word_spans)
    spans = []
    for (start, end), token in zip(encoded.offsets, encoded.tokens, strict=True):
        start = start - (
            text[start] != " " and token.startswith("Ġ")
        )  # a leading space may be left out of it
        first = min(round(bounds[start]), num_ticks - 1)
        spans.append((first, max(first + 1, min(round(bounds[end]), num_ticks))))
    return Clip(audio, encoded.ids, spans, sentence.text, word_spans)


def _gain(audio: np.ndarray) -> float:
    samples = audio.astype(np.float32)
    return min(_LEVEL / np.sqrt(np.square(samples).mean()), _PEAK / np.abs(samples).max())


def _letter_times(words: tuple[str, ...], word_spans: list[tuple[float, float]]) -> np.ndarray:
    """Time of each letter's start (the space before a word counts as its first), and of the last one's end."""
    places = np.cumsum([0, *(len(word) + 1 for word in words)])
    times = [*(start for start, _ in word_spans), word_spans[-1][1]]
    return np.interp(np.arange(places[-1] + 1), places, times)


def clips(seed: str, tokenizer: Tokenizer, heldout: bool = False) -> Iterator[Clip]:
    """An endless stream of clips; a voice says a few sentences in a row."""
    rng, espeak, source = random.Random(seed), load_espeak(), sentences(seed, heldout)
    while True:
        voice = Voice.draw(rng, heldout)
        for _ in range(CLIPS_PER_VOICE):
            sentence = next(source)
            clip = make_clip(sentence, espeak.say(sentence, voice), tokenizer, rng.randrange(TICK))
            if len(clip.tokens) <= MAX_TOKENS:
                yield clip


def chunks(source: Iterator[Clip]) -> Iterator[Chunk]:
    """Fill one chunk after another; the clip that does not fit is left out."""
    while True:
        chunk = Chunk(
            audio=np.zeros(CHUNK_TICKS * TICK, np.int16),
            frame_tokens=np.zeros(CHUNK_TICKS, np.int16),
            starts=np.zeros(MAX_CLIPS, np.int32),
            ticks=np.zeros(MAX_CLIPS, np.int32),
            counts=np.zeros(MAX_CLIPS, np.int32),
            tokens=np.zeros((MAX_CLIPS, MAX_TOKENS), np.int16),
            spans=np.zeros((MAX_CLIPS, MAX_TOKENS, 2), np.int16),
            num_clips=0,
        )
        yield _fill(chunk, source)


def _fill(chunk: Chunk, source: Iterator[Clip]) -> Chunk:
    used = row = 0
    for clip in source:
        if used + clip.ticks > CHUNK_TICKS or row == MAX_CLIPS:
            break
        count = len(clip.tokens)
        chunk.audio[used * TICK : (used + clip.ticks) * TICK] = clip.audio
        for token, (start, end) in zip(clip.tokens, clip.spans, strict=True):
            chunk.frame_tokens[used + start : used + end] = token + 1
        chunk.starts[row], chunk.ticks[row], chunk.counts[row] = used, clip.ticks, count
        chunk.tokens[row, :count], chunk.spans[row, :count] = clip.tokens, clip.spans
        used += clip.ticks
        row += 1
    return chunk._replace(num_clips=row)


def _work(seed: str, tokenizer_json: str, queue: "Queue[Chunk]") -> None:
    for chunk in chunks(clips(seed, Tokenizer.from_str(tokenizer_json))):
        queue.put(chunk)


def start_workers(seed: int, count: int, tokenizer: Tokenizer) -> "tuple[Queue[Chunk], list[BaseProcess]]":
    """Processes that put chunks into a queue until they are terminated; each has a seed of its own.

    To be called before the process has threads or a GPU.
    """
    context = multiprocessing.get_context("fork")  # others would import torch and transformers in each
    queue = context.Queue(maxsize=2 * count)
    workers = [
        context.Process(target=_work, args=(f"{seed}:{worker}", tokenizer.to_str(), queue), daemon=True)
        for worker in range(count)
    ]
    for worker in workers:
        worker.start()
    return queue, workers
