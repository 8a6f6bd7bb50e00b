"""Decoded audio on its way to one array, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from core_runner.audio.sources import Samples
from core_runner.errors import AudioError

_LONGEST_S: Final = 24 * 3600
_BELIEVED_S: Final = 2 * 3600


@dataclass(frozen=True, slots=True)
class Decoded:
    """Samples float32 [n], n > 0, mono in [-1, 1]; and what was damaged or missing, None where nothing was."""

    samples: Samples
    damage: str | None = None


class SampleBuffer:
    """Samples of `name` at `sampling_rate`; grows by doubling, so that little else is held."""

    def __init__(self, name: str, sampling_rate: int, expected_s: float = 0.0) -> None:
        """Room for `expected_s` seconds at first, if a file can be believed."""
        self.name, self.sampling_rate = name, sampling_rate
        room = int(min(max(expected_s, 1.0), _BELIEVED_S) * sampling_rate)
        self._array: Samples = np.empty(room, dtype=np.float32)
        self._num_samples = 0

    @property
    def seconds(self) -> float:
        """Length of what is there."""
        return self._num_samples / self.sampling_rate

    def append(self, samples: npt.NDArray[np.floating]) -> None:
        """Copy samples [n], clipped to [-1, 1] as whatever plays them would. Raises `AudioError` for NaN."""
        part = self._next(len(samples))
        np.clip(samples, -1.0, 1.0, out=part, casting="same_kind")
        if np.isnan(part).any():
            raise AudioError(f"{self.name}: holds samples that are no numbers (NaN); export it again")

    def append_silence(self, seconds: float) -> None:
        """Zeros, where a recording has a gap."""
        self._next(round(seconds * self.sampling_rate))[:] = 0.0

    def finish(self, damage: str | None) -> Decoded:
        """The result. Raises `AudioError` where there is nothing."""
        if self._num_samples == 0:
            # A resampler gives nothing for what is shorter than its filter.
            raise AudioError(f"{self.name}: holds no audio ({damage or 'not even 10 ms of it'})")
        self._array.resize(self._num_samples, refcheck=False)
        return Decoded(self._array, damage)

    def _next(self, num_samples: int) -> Samples:
        begin, end = self._num_samples, self._num_samples + num_samples
        if end > _LONGEST_S * self.sampling_rate:
            # A few bytes can claim to be years.
            raise AudioError(f"{self.name}: is longer than {_LONGEST_S // 3600} hours; cut it into parts")
        if end > len(self._array):
            # In place where the system can: a copy would hold an hour of audio twice.
            self._array.resize(max(end, 2 * len(self._array)), refcheck=False)
        self._num_samples = end
        return self._array[begin:end]
