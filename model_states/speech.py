"""What transcription takes and gives, whichever model does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Windows = Literal["sequential", "parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """How audio is transcribed; the defaults are those of the published algorithm (Radford et al. 2022, section 4.5).

    language: code or English name; None has the model detect it in the first window. task: "transcribe", or
    "translate" into English. windows: "sequential" cuts each window where the text of the one before ended;
    "parallel" cuts at quiet points first and decodes all windows at once, which is many times faster. word_timestamps:
    fill `Segment.words`. initial_prompt: text taken as said before the audio begins. condition_on_previous_text: give
    each window the text before it (sequential only). temperatures: tried in turn while a window looks wrong:
    compression ratio of its text above `compression_ratio_threshold`, or mean logprob (nats a token) below
    `logprob_threshold`. no_speech_threshold: a window with a higher probability of no speech and a mean logprob below
    `logprob_threshold` is silence. seed: of sampling at temperatures above zero. None switches a threshold off.
    """

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    windows: Windows = "sequential"
    word_timestamps: bool = False
    initial_prompt: str | None = None
    condition_on_previous_text: bool = True
    temperatures: Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word with its spaces and punctuation; start and end in seconds of the audio; mean probability of its tokens."""

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of text; start and end in seconds of the audio, within its duration, never before the one before.

    What the window that it came from was decoded with and looked like: temperature, mean logprob (nats a token),
    compression ratio of the text, probability of no speech. suspect: it was over a threshold at every temperature.
    words: None unless asked for.
    """

    start: float
    end: float
    text: str
    token_ids: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    suspect: bool = False
    words: Sequence[Word] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """Text of one audio, its language code (None if the model knows one alone), and its duration in seconds."""

    text: str
    language: str | None
    duration: float
    segments: Sequence[Segment]
