"""Speech from espeak-ng through ctypes, with the place of each word; used to train and never by the package.

espeak-ng (GPL-3.0) comes as a shared library in the wheel `espeakng-loader`. It keeps its state in globals, so a
process has one `Espeak`, which `load_espeak` gives, and threads are not for it.
"""

import ctypes
import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sentences import Sentence

SAMPLING_RATE = 22050
TICK = 441  # samples in 20 ms, which is a position of the encoder and a step of the timestamps

ACCENTS = (
    "en-us", "en-us-nyc", "en", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029",
)  # fmt: skip

HELDOUT_VARIANTS = ("f4", "m6", "linda", "pablo", "Jacky", "edward", "steph2", "marcelo")
"""Speakers of the evaluation; no training clip has one of them, in any accent."""

VARIANTS = (
    "f1", "f2", "f3", "f5", "m1", "m2", "m3", "m4", "m5", "m7", "m8", "Alex", "Alicia", "Andrea", "Andy", "Annie",
    "Denis", "Diogo", "Gene", "Gene2", "Henrique", "Hugo", "Lee", "Marco", "Mario", "Michael", "Mike", "Nguyen",
    "Reed", "adam", "anika", "antonio", "aunty", "belinda", "benjamin", "boris", "caleb", "david", "ed", "grandma",
    "grandpa", "gustave", "ian", "iven", "iven2", "iven3", "john", "kaukovalta", "klatt", "klatt2", "klatt3", "max",
    "michel", "miguel", "mike2", "norbert", "paul", "pedro", "quincy", "rob", "robert", "sandro", "shelby", "steph",
    "travis", "victor", "zac",
)  # fmt: skip

_RATE, _PITCH, _RANGE, _WORDGAP = 1, 3, 4, 7
_SYNCHRONOUS, _BUFFER_MS = 2, 20_000
_WORD_EVENT, _UTF8 = 1, 1


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclass(frozen=True)
class Voice:
    """Who speaks: accent and speaker by espeak's names, words a minute, pitch and its range (0 to 99, 50 is usual)."""

    accent: str
    variant: str
    rate: int = 160
    pitch: int = 50
    pitch_range: int = 50
    word_gap: int = 0

    @classmethod
    def draw(cls, rng: random.Random, heldout: bool) -> "Voice":
        """A voice of one side of the split."""
        return cls(
            accent=rng.choice(ACCENTS),
            variant=rng.choice(HELDOUT_VARIANTS if heldout else VARIANTS),
            rate=rng.randint(125, 205),
            pitch=rng.randint(30, 70),
            pitch_range=rng.randint(30, 70),
            word_gap=rng.choice((0, 0, 0, rng.randint(1, 6))),
        )


class Spoken(NamedTuple):
    """int16 samples at `SAMPLING_RATE`, and where each written word starts and ends in them."""

    audio: np.ndarray
    word_spans: list[tuple[int, int]]


class Espeak:
    """The library, loaded and waiting for sentences."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._audio: list[bytes] = []
        self._words: list[tuple[int, int]] = []  # place in the text, sample
        self._callback = _Callback(self._collect)
        path = espeakng_loader.get_data_path().encode()
        rate = self._library.espeak_Initialize(_SYNCHRONOUS, _BUFFER_MS, path, 0)
        if rate != SAMPLING_RATE:
            raise RuntimeError(f"espeak-ng at {path!r} answers {rate}, and should give {SAMPLING_RATE} Hz")
        self._library.espeak_SetSynthCallback(self._callback)
        self._voice: Voice | None = None

    def _use(self, voice: Voice) -> None:
        self._voice = voice
        name = f"{voice.accent}+{voice.variant}"
        if self._library.espeak_SetVoiceByName(name.encode()) != 0:
            raise RuntimeError(f"espeak-ng has no voice {name!r}")
        for parameter, value in (
            (_RATE, voice.rate),
            (_PITCH, voice.pitch),
            (_RANGE, voice.pitch_range),
            (_WORDGAP, voice.word_gap),
        ):
            self._library.espeak_SetParameter(parameter, value, 0)

    def say(self, sentence: Sentence, voice: Voice) -> Spoken:
        """Speak a sentence; words that espeak runs together share their time by their letters."""
        if voice != self._voice:
            self._use(voice)
        self._audio.clear()
        self._words.clear()
        text = " ".join(sentence.said).encode()
        self._library.espeak_Synth(text, len(text) + 1, 0, 1, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        audio = np.frombuffer(b"".join(self._audio), np.int16)
        loud = np.abs(audio.astype(np.int32))
        audio = audio[: 1 + int(np.flatnonzero(loud > loud.max() * 0.02)[-1])]  # some voices end in silence
        return Spoken(audio, word_spans(sentence.said, self._words, len(audio)))

    def _collect(self, samples: Any, count: int, events: Any) -> int:
        if count > 0:
            self._audio.append(ctypes.string_at(samples, count * 2))
        index = 0
        while (event := events[index]).type != 0:
            if event.type == _WORD_EVENT:
                self._words.append((event.text_position - 1, event.sample))
            index += 1
        return 0


@functools.cache
def load_espeak() -> Espeak:
    """The one of this process."""
    return Espeak()


def word_spans(
    said: tuple[str, ...], events: list[tuple[int, int]], num_samples: int
) -> list[tuple[int, int]]:
    """Start and end of each word, by interpolating between the places that espeak reports."""
    ends = np.cumsum([len(word) + 1 for word in said])
    places = [0, *(place for place, _ in events), int(ends[-1])]
    samples = [0, *(min(sample, num_samples) for _, sample in events), num_samples]
    bounds = np.interp([0, *ends], places, samples).astype(int).tolist()
    return list(itertools.pairwise(bounds))
