"""`load_audio`: one source to samples."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

from core_runner.audio.buffer import Decoded, SampleBuffer
from core_runner.audio.decode import decode
from core_runner.audio.sources import Samples, Source, name_of, opened
from core_runner.audio.wav import decode_wav, find_plain_wav
from core_runner.errors import AudioError

logger = logging.getLogger(__name__)


def load_audio(source: Source, sampling_rate: int) -> Samples:
    """Samples float32 [n], mono in [-1, 1], at `sampling_rate` a second, of an audio file or a video's sound.

    source: path, bytes, or file opened in binary mode. Mono and stereo WAV files at usual rates need nothing else, all
    others the extra `audio`. A file that is cut short or damaged in places gives what can be decoded, and a warning in
    the log. Raises `AudioError`, naming the file, where that is nothing.
    """
    return take_samples(source, decode_source(source, sampling_rate))


def decode_source(source: Source, sampling_rate: int) -> Decoded:
    """As `load_audio`, with what is damaged in the result and not in the log."""
    if not isinstance(sampling_rate, int) or sampling_rate < 1:
        raise AudioError(f"sampling_rate={sampling_rate!r} must be a positive integer, such as 16000")
    name = name_of(source)
    with opened(source) as file:
        try:
            wav = find_plain_wav(file)
            if wav is None or wav.needs_av(sampling_rate):
                _require_av(name)
            if wav is None:
                return decode(file, name, sampling_rate)
            return decode_wav(wav, file, SampleBuffer(name, sampling_rate, wav.seconds))
        except OSError as error:
            raise AudioError(f"{name}: cannot be read ({error.strerror or error})") from error


def takes_long(source: Source, sampling_rate: int) -> bool:
    """Whether it is decoded or resampled; False too for what cannot be read, or be read twice."""
    if hasattr(source, "read"):
        return False
    try:
        with opened(source) as file:
            wav = find_plain_wav(file)
    except (AudioError, OSError):
        return False
    if wav is None or wav.needs_av(sampling_rate):
        return _has_av()
    return wav.rate != sampling_rate


@cache
def _has_av() -> bool:
    return find_spec("av") is not None


def _require_av(name: str) -> None:
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise AudioError(
            f'{name}: reading it needs the package av, which is not installed; run: pip install "core-runner[audio]" '
            "(without it, mono and stereo WAV files at usual rates can be read)"
        ) from error


def take_samples(source: Source, decoded: Decoded) -> Samples:
    """The samples, once the log has what is wrong with them."""
    if decoded.damage is not None:
        logger.warning("%s is damaged: %s", name_of(source), decoded.damage)
    return decoded.samples
