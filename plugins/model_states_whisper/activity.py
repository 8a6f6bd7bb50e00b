"""Where a recording holds speech, by its loudness, and where it can be cut into windows.

Speech is louder than what it is recorded with and changes all the time. So a frame counts where its level is a good way
up from the noise floor around it to the speech around it; steady noise, however loud, has nothing in between and counts
as silence. In doubt a frame is speech: the model is the better judge, and only has more to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]
Levels = npt.NDArray[np.float32]  # decibels of full scale, by frame
Mask = npt.NDArray[np.bool_]

_FRAMES_PER_SECOND: Final = 100
_CHUNK: Final = 6_000  # frames that are looked at at once
_SILENCE: Final = -100.0  # decibels
# Of the way from floor to speech, where a stretch begins and down to where it goes on; decibels, at least.
_ENTER, _STAY = (0.3, 3.0), (0.2, 2.0)
_STEADY: Final = 4.0  # decibels between floor and speech, up to which there is noise alone
_DEEPEST: Final = 50.0  # decibels below the recording's speech, under which nothing is looked for
_AROUND: Final = 15  # seconds before and after, for floor and speech
_UNBROKEN: Final = 5  # seconds in which whoever speaks pauses for a tenth of one
_BRIDGED: Final = 30  # frames of a pause within speech
_SHORTEST: Final = 8  # frames of speech, the rest are clicks
_MARGIN: Final = 20  # frames that are kept before and after
_LONGEST_PAUSE: Final = 500  # frames within a window


class Stretch(NamedTuple):
    """Frames [start, end)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SpeechMap:
    """windows: samples [start, end) that are to be decoded, in order. frame_samples: of a frame."""

    windows: Sequence[tuple[int, int]]
    frame_samples: int
    _spoken_before: npt.NDArray[np.int64]  # frames of speech before each frame, [frames + 1]

    def seconds(self, start: int, end: int) -> float:
        """How long there is speech between two samples."""
        last = len(self._spoken_before) - 1
        first, stop = (min(max(sample, 0) // self.frame_samples, last) for sample in (start, end))
        return float(self._spoken_before[stop] - self._spoken_before[first]) / _FRAMES_PER_SECOND


def map_speech(audio: Samples, sampling_rate: int, longest: int) -> SpeechMap:
    """Speech of a recording float32 [n], and windows of at most `longest` samples that hold all of it.

    They are cut where it is quiet, and leave out pauses between them. Beside the recording this holds a few numbers for
    each 10 ms of it.
    """
    frame_samples = sampling_rate // _FRAMES_PER_SECOND
    levels = frame_levels(audio, frame_samples)
    is_speech = find_speech(levels)
    stretches = _with_margins(_runs(is_speech), len(levels))
    windows = [
        (start * frame_samples, min(end * frame_samples, len(audio)))
        for start, end in pack(stretches, levels, longest // frame_samples)
    ]
    return SpeechMap(windows, frame_samples, np.concatenate([[0], is_speech.cumsum()]))


def frame_levels(audio: Samples, frame_samples: int) -> Levels:
    """Power of each frame of a recording float32 [n] without its mean, decibels, [ceil(n / frame_samples)]."""
    num_whole = len(audio) // frame_samples
    power = np.empty(-(-len(audio) // frame_samples), dtype=np.float32)
    for first in range(0, num_whole, _CHUNK):
        last = min(first + _CHUNK, num_whole)
        frames = audio[first * frame_samples : last * frame_samples].reshape(-1, frame_samples)
        power[first:last] = np.einsum("ij,ij->i", frames, frames) / frame_samples - frames.mean(axis=1) ** 2
    if num_whole < len(power):
        power[-1] = audio[num_whole * frame_samples :].var()
    levels: Levels = 10.0 * np.log10(np.maximum(power, 10.0 ** (_SILENCE / 10)))
    return levels


def find_speech(levels: Levels) -> Mask:
    """Which frames hold speech, with the pauses within words and sentences, and without clicks."""
    if not len(levels):
        return np.zeros(0, dtype=np.bool_)
    smooth = _smoothed(levels, 3)
    floor, speech = _surroundings(smooth)
    span = speech - floor
    enter, stay = (floor + np.maximum(share * span, least) for share, least in (_ENTER, _STAY))
    least = np.percentile(speech, 95) - _DEEPEST
    enter, stay = np.maximum(enter, least), np.maximum(stay, least)
    enter[span < _STEADY] = np.inf
    is_loud = smooth > enter
    runs = [run for run in _runs(smooth > stay) if is_loud[run.start : run.end].any()]
    mask = np.zeros(len(levels), dtype=np.bool_)
    for run in _bridged(runs, _BRIDGED):
        if run.end - run.start >= _SHORTEST:
            mask[run.start : run.end] = True
    return mask


def pack(stretches: Sequence[Stretch], levels: Levels, longest: int) -> list[Stretch]:
    """Windows of at most `longest` frames over the stretches, as few as there are good places to cut.

    A cut is best between two stretches. Where that would leave more than half of a window empty, or there is none, it
    is at the quietest point of the window's last third.
    """
    windows: list[Stretch] = []
    rest = list(reversed(stretches))
    last_third = longest * 2 // 3
    while rest:
        start, end = rest.pop()
        while rest and rest[-1].start - end <= _LONGEST_PAUSE:
            fits = rest[-1].end - start <= longest
            is_half_empty = end - start < longest // 2 and rest[-1].start - start < last_third
            if not (fits or is_half_empty):
                break
            end = rest.pop().end
        if end - start > longest:
            quietest = _smoothed(levels[start + last_third : start + longest], 20).argmin()
            rest.append(Stretch(start + last_third + int(quietest), end))
            end = rest[-1].start
        windows.append(Stretch(start, end))
    return windows


def _smoothed(levels: Levels, width: int) -> Levels:
    """Moving average of the levels; at the ends, over the frames that there are."""
    if not len(levels):
        return levels
    sums = np.concatenate([[0.0], np.cumsum(levels, dtype=np.float64)])
    places = np.arange(len(levels))
    first = np.maximum(places - width // 2, 0)
    last = np.minimum(places - width // 2 + width, len(levels))
    averages: Levels = ((sums[last] - sums[first]) / (last - first)).astype(np.float32)
    return averages


def _surroundings(levels: Levels) -> tuple[Levels, Levels]:
    """Noise floor and level of speech around each frame, from percentiles of each second and of those around it.

    Where noise sets in, most of what is around it may be quieter. So the floor is no lower than the quietest second of
    any `_UNBROKEN` ones in a row: speech would have paused in those.
    """
    missing = -len(levels) % _FRAMES_PER_SECOND
    seconds = np.pad(levels, (0, missing), mode="edge")
    low, high = np.percentile(seconds.reshape(-1, _FRAMES_PER_SECOND), (10, 95), axis=1)
    floor = np.maximum(np.percentile(_neighbours(low), 20, axis=1), _opened(low, _UNBROKEN))
    by_second = np.stack([floor, _neighbours(high).max(axis=1)])
    by_frame = by_second.astype(np.float32).repeat(_FRAMES_PER_SECOND, axis=1)[:, : len(levels)]
    return by_frame[0], by_frame[1]


def _neighbours(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Values of each second and those around it, [n, 2 * _AROUND + 1]; past the ends they are mirrored."""
    width = min(_AROUND, len(values) - 1)
    padded = np.pad(values, width, mode="reflect")
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1)


def _opened(values: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Of each value, the highest minimum of any `width` neighbours with it among them: peaks that are narrower go."""
    width = min(width, len(values))
    minima = np.lib.stride_tricks.sliding_window_view(values, width).min(axis=1)
    around = np.pad(minima, width - 1, constant_values=-np.inf)
    opened: npt.NDArray[np.float64] = np.lib.stride_tricks.sliding_window_view(around, width).max(axis=1)
    return opened


def _runs(mask: Mask) -> list[Stretch]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [Stretch(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _bridged(runs: Sequence[Stretch], longest_gap: int) -> list[Stretch]:
    """The same with those that lie close together as one."""
    joined: list[Stretch] = []
    for run in runs:
        if joined and run.start - joined[-1].end <= longest_gap:
            joined[-1] = Stretch(joined[-1].start, run.end)
        else:
            joined.append(run)
    return joined


def _with_margins(runs: Sequence[Stretch], num_frames: int) -> list[Stretch]:
    wider = [Stretch(max(run.start - _MARGIN, 0), min(run.end + _MARGIN, num_frames)) for run in runs]
    return _bridged(wider, 0)
