"""Mono samples from one rate to another as products of matrices, which BLAS does in a third of FFmpeg's time.

Output j lies at input j * down / up, the two rates in lowest terms, and is a sum of the inputs around it, weighted by a
windowed sinc. Outputs are made in groups of `_GROUP`, each of which is one row of inputs times one matrix of weights;
after a few groups positions repeat, so that all groups at one place of the period are one product.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from core_runner.audio.buffer import SampleBuffer
from core_runner.audio.sources import Samples

# A Kaiser window for 70 dB. Half of the filter is 44 samples of the lower rate, so that it is flat up to 0.92 of half
# that rate and has lost 70 dB at 1.02 of it; docs/transcription.md promises a little less.
_BETA: Final = 0.1102 * (70.0 - 8.7)
_HALF_WIDTH: Final = 44
_CUTOFF: Final = 0.97
_GROUP: Final = 32
# Multiplications of one product. From about twice as many OpenBLAS spreads one over threads, which wait for each other
# in busy loops: where the processors had other work, a file took ten times as long.
_MOST_PRODUCT: Final = 1 << 18
_RATES: Final = range(1000, 400_000)
_MOST_WEIGHTS: Final = 1 << 18  # of a pair of rates; odd ones would need tables of many megabytes


def can_resample(rate: int, wanted: int) -> bool:
    """Whether the two rates have a small common measure, as those of recordings do."""
    divisor = math.gcd(rate, wanted)
    return rate in _RATES and math.prod(_shape(wanted // divisor, rate // divisor)) <= _MOST_WEIGHTS


class Resampler:
    """Takes samples that follow one another, and appends what comes of them to a buffer."""

    def __init__(self, buffer: SampleBuffer, rate: int) -> None:
        """rate: of the samples; `can_resample` to the buffer's."""
        self._buffer = buffer
        divisor = math.gcd(rate, buffer.sampling_rate)
        self._up, self._down = buffer.sampling_rate // divisor, rate // divisor
        self._weights = _weights(self._up, self._down)
        # Inputs from the first one that an output to come needs; before the first of all there is silence.
        self._held = np.zeros(_reach(self._up, self._down), np.float32)
        self._num_in = self._num_out = 0

    def feed(self, samples: npt.NDArray[np.floating]) -> None:
        """Take samples [n]; the last ones are held back until those after them are known."""
        self._num_in += len(samples)
        self._advance(samples)

    def flush(self) -> None:
        """Have everything that was fed in the buffer: an output for each that lies before the end."""
        self._advance(np.zeros(self._weights.shape[1] + self._period, np.float32))

    @property
    def _period(self) -> int:
        """Inputs after which positions repeat."""
        return len(self._weights) * _GROUP * self._down // self._up

    def _advance(self, samples: npt.NDArray[np.floating]) -> None:
        held = np.concatenate((self._held, samples), dtype=np.float32, casting="same_kind")
        num_groups, num_inputs, _ = self._weights.shape
        starts = [group * _GROUP * self._down // self._up for group in range(num_groups)]
        num_periods = max((len(held) - starts[-1] - num_inputs) // self._period + 1, 0)
        out = np.empty((num_periods, num_groups, _GROUP), np.float32)
        # Rows of one product must not overlap, or numpy would copy them.
        apart = -(-num_inputs // self._period)
        for first in range(min(apart, num_periods)):
            num_rows = len(range(first, num_periods, apart))
            for group, start in enumerate(starts):
                begin = held[first * self._period + start :]
                rows = as_strided(
                    begin, (num_rows, num_inputs), (4 * apart * self._period, 4), writeable=False
                )
                _multiply(rows, self._weights[group], out[first::apart, group])
        self._held = held[num_periods * self._period :]
        wanted = -(-self._num_in * self._up // self._down) - self._num_out
        self._append(out.reshape(-1)[:wanted])

    def _append(self, samples: Samples) -> None:
        self._num_out += len(samples)
        self._buffer.append(samples)


def _multiply(rows: Samples, weights: Samples, out: Samples) -> None:
    """Write rows @ weights to `out`."""
    most = max(_MOST_PRODUCT // weights.size, 1)
    num_whole = len(rows) // most * most
    whole = rows[:num_whole].reshape(num_whole // most, most, len(weights)) @ weights
    out[:num_whole] = whole.reshape(num_whole, weights.shape[1])
    out[num_whole:] = rows[num_whole:] @ weights


def _reach(up: int, down: int) -> int:
    """Inputs to each side of an output that count."""
    return math.ceil(_HALF_WIDTH * max(down / up, 1.0))


def _shape(up: int, down: int) -> tuple[int, int, int]:
    """Of the weights: groups, inputs, outputs of a group."""
    return up // math.gcd(up, _GROUP), _GROUP * down // up + 2 * _reach(up, down) + 2, _GROUP


@lru_cache(maxsize=16)
def _weights(up: int, down: int) -> npt.NDArray[np.float32]:
    """[groups, inputs, outputs of a group]; the first input lies `_reach` before the group's whole first position."""
    num_groups, num_inputs, _ = _shape(up, down)
    outputs = np.arange(num_groups * _GROUP).reshape(num_groups, 1, _GROUP)
    begins = outputs[:, :, :1] * down // up - _reach(up, down)
    inputs = begins + np.arange(num_inputs)[:, None]
    share = min(up / down, 1.0)  # of the input's band that is kept
    distances = (outputs * down - inputs * up) / up * share  # in samples of the lower rate
    inside = np.clip(1.0 - (distances / _HALF_WIDTH) ** 2, 0.0, None)
    weights = np.sinc(_CUTOFF * distances) * np.i0(_BETA * np.sqrt(inside)) * (inside > 0.0)
    scaled: npt.NDArray[np.float32] = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return scaled
