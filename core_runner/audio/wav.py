"""Plain WAV files, mono or stereo: read in large blocks, and without a decoding library at any usual rate."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Final

import numpy as np
import numpy.typing as npt

from core_runner.audio.buffer import Decoded, SampleBuffer
from core_runner.audio.convert import Converter
from core_runner.audio.resample import Resampler, can_resample

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_BITS: Final = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
_BLOCK: Final = 1 << 18  # frames that are converted at once
_UNKNOWN_SIZE: Final = (
    0x7FFF0000  # bytes, and above: what programs write that do not know yet how long it will be
)


@dataclass(frozen=True, slots=True)
class PlainWav:
    """What a header says of samples that need no codec and no table of loudspeakers.

    bits: of one sample of one channel. begin: of the samples in the file, in bytes. declared, present: bytes of them.
    """

    tag: int
    channels: int
    rate: int
    bits: int
    begin: int
    declared: int
    present: int

    @property
    def num_frames(self) -> int:
        """Samples of one channel."""
        return min(self.declared, self.present) // self._frame_bytes

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.num_frames / self.rate

    @property
    def damage(self) -> str | None:
        """What is missing, or None."""
        if self.present >= self.declared or self.declared >= _UNKNOWN_SIZE:
            return None
        declared_s = self.declared / self._frame_bytes / self.rate
        return f"it ends after {self.seconds:.2f} s of {declared_s:.2f} s"

    def needs_av(self, sampling_rate: int) -> bool:
        """Whether it takes PyAV to have it at this rate."""
        return self.rate != sampling_rate and not can_resample(self.rate, sampling_rate)

    def blocks(self, file: IO[bytes]) -> Iterator[npt.NDArray[np.floating]]:
        """The samples [n], mono, block after block."""
        file.seek(self.begin)
        for first in range(0, self.num_frames, _BLOCK):
            data = file.read(min(_BLOCK, self.num_frames - first) * self._frame_bytes)
            samples = self._to_float(data)
            yield samples if self.channels == 1 else (samples[::2] + samples[1::2]) / 2

    @property
    def _frame_bytes(self) -> int:
        return self.channels * self.bits // 8

    def _to_float(self, data: bytes) -> npt.NDArray[np.floating]:
        """Samples in [-1, 1] as they lie in the file, channels interleaved."""
        if self.tag == _FLOAT:
            return np.frombuffer(data, dtype=f"<f{self.bits // 8}")
        if self.bits == 8:
            return (np.frombuffer(data, dtype=np.uint8).astype(np.float32) - 128.0) / 128.0
        if self.bits == 24:
            wide = np.zeros((len(data) // 3, 4), dtype=np.uint8)
            wide[:, 1:] = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
            return wide.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
        whole = np.frombuffer(data, dtype=f"<i{self.bits // 8}")
        return whole.astype(np.float32) / np.float32(2 ** (self.bits - 1))


def find_plain_wav(file: IO[bytes]) -> PlainWav | None:
    """The header of `file`, which is at its beginning before and after; None if it is of any other kind."""
    try:
        return _parse(file)
    finally:
        file.seek(0)


def decode_wav(wav: PlainWav, file: IO[bytes], buffer: SampleBuffer) -> Decoded:
    """Its samples at the buffer's rate; `needs_av` says for which rates that takes PyAV. `AudioError` for none."""
    if wav.rate == buffer.sampling_rate:
        for block in wav.blocks(file):
            buffer.append(block)
    elif wav.needs_av(buffer.sampling_rate):
        converter = Converter(buffer)
        for block in wav.blocks(file):
            converter.feed_samples(block, wav.rate)
        converter.flush()
    else:
        resampler = Resampler(buffer, wav.rate)
        for block in wav.blocks(file):
            resampler.feed(block)
        resampler.flush()
    return buffer.finish(wav.damage)


def _parse(file: IO[bytes]) -> PlainWav | None:
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return None
    form = b""
    while len(header := file.read(8)) == 8:
        kind, size = header[:4], int.from_bytes(header[4:], "little")
        if kind == b"data":
            begin = file.tell()
            return _plain(form, begin, size, file.seek(0, os.SEEK_END) - begin)
        if kind == b"fmt ":
            form = file.read(min(size, 40))
            size -= len(form)
        file.seek(size + size % 2, os.SEEK_CUR)
    return None


def _plain(form: bytes, begin: int, declared: int, present: int) -> PlainWav | None:
    """What the chunk "fmt " says, if it is plain."""
    if len(form) < 16:
        return None
    tag, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if tag == _EXTENSIBLE and len(form) >= 26:
        tag = int.from_bytes(form[24:26], "little")
    # How more channels than two are mixed depends on which loudspeaker each is for.
    is_plain = channels in (1, 2) and rate > 0 and bits in _BITS.get(tag, ())
    return PlainWav(tag, channels, rate, bits, begin, declared, present) if is_plain else None
