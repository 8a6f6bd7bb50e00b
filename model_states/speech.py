"""What transcription takes and gives, whichever model does it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

Task = Literal["transcribe", "translate"]
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

    Raises `ValueError` for values that no model could serve.
    """

    language: str | None = None
    task: Task = "transcribe"
    windows: Windows = "sequential"
    word_timestamps: bool = False
    initial_prompt: str | None = None
    condition_on_previous_text: bool = True
    temperatures: Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values of a wrong type or range; a single temperature becomes a tuple of one."""
        for name in ("language", "initial_prompt"):
            self._require(name, self._of(name) is None or isinstance(self._of(name), str), "a string or None")
        for name, choices in (("task", get_args(Task)), ("windows", get_args(Windows))):
            self._require(name, self._of(name) in choices, f"one of {', '.join(map(repr, choices))}")
        for name in ("word_timestamps", "condition_on_previous_text"):
            self._require(name, isinstance(self._of(name), bool), "True or False")
        given: Any = self.temperatures
        temperatures = tuple(given) if isinstance(given, Iterable) else (given,)
        fits = bool(temperatures) and all(_is_number(t) and 0 <= t < math.inf for t in temperatures)
        self._require("temperatures", fits, "one or several finite numbers, 0 or more")
        object.__setattr__(self, "temperatures", tuple(float(t) for t in temperatures))
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            self._require(name, self._of(name) is None or _is_number(self._of(name)), "a number or None")
        is_int = isinstance(self.seed, Integral) and not isinstance(self.seed, bool)
        self._require("seed", is_int, "an integer")

    def _of(self, name: str) -> Any:
        return getattr(self, name)

    def _require(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ValueError(f"{name}={self._of(name)!r} must be {wanted}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


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
    """Text of one audio, its language code (None if the model knows one alone), and its duration in seconds.

    error: why there is no text, where the audio could not be read or transcribed.
    """

    text: str
    language: str | None
    duration: float
    segments: Sequence[Segment]
    error: str | None = None
