"""Any other audio, through PyAV, whose wheels have FFmpeg inside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO, Any, Final

from core_runner.audio.buffer import Decoded, SampleBuffer
from core_runner.audio.convert import Converter
from core_runner.errors import AudioError

_READ_BYTES: Final = 1 << 18
_LEAST_GAP_S: Final = 0.1  # less is rounding of timestamps, or a lost packet that nobody hears
_LONGEST_GAP_S: Final = 3600.0  # more is a damaged timestamp, and no reason to hold a day of silence
# Frames with nothing around them: durations and timestamps are guesses from the first ones.
_BARE_FORMATS: Final = frozenset({"aac", "ac3", "eac3", "dts"})


def decode(file: IO[bytes], name: str, sampling_rate: int) -> Decoded:
    """The default audio stream of `file`, mono at `sampling_rate` samples a second.

    What is damaged is left out, and gaps are filled with silence, so that what follows keeps its time. Raises
    `AudioError` where nothing can be decoded.
    """
    import av

    # FFmpeg sees no name, which it might take for an address, but the suffix, by which it knows a few formats.
    suffix = os.path.splitext(name)[1][:8]
    reader = _Reader(file, f"audio{suffix}")
    # Other files, which a playlist might name, are not read.
    settings: dict[str, Any] = {
        "buffer_size": _READ_BYTES,
        "options": {"protocol_whitelist": "none"},
    }
    if int(av.__version__.split(".")[0]) < 19:  # later ones take tags as they are
        settings["metadata_errors"] = "replace"
    try:
        with av.open(reader, **settings) as container:
            stream = _audio_stream(container, name)
            buffer = SampleBuffer(name, sampling_rate, (container.duration or 0) / 1e6)
            return _decode_stream(container, stream, buffer)
    except AudioError:  # which is a ValueError too
        raise
    except (av.error.FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AudioError(f"{name}: is no audio that can be read ({reason})") from error


class _Reader:
    """What FFmpeg reads from."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.read, self.tell, self.name = file.read, file.tell, name
        self._seek = file.seek

    def seek(self, offset: int, whence: int) -> int:
        """-1 where a damaged file has it seek to before its beginning: an exception would be printed, not raised."""
        try:
            return self._seek(offset, whence)
        except (OSError, ValueError):
            return -1


def _audio_stream(container: Any, name: str) -> Any:
    """The stream that players choose."""
    stream = container.streams.best("audio")
    if stream is None:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "no streams"
        raise AudioError(f"{name}: has no audio ({kinds} only)")
    if stream.codec_context is None:
        raise AudioError(
            f"{name}: its sound is in a format that FFmpeg does not know, or its header is damaged"
        )
    # One thread for each file: many files are decoded at once.
    stream.codec_context.thread_count = 1
    return stream


def _decode_stream(container: Any, stream: Any, buffer: SampleBuffer) -> Decoded:
    duration_s = 0.0 if container.format.name in _BARE_FORMATS else (container.duration or 0) / 1e6
    frames, timeline = _Frames(container, stream), _Timeline(container, duration_s)
    converter = Converter(buffer)
    for frame in frames:
        gap_s = timeline.gap_before(frame)
        if gap_s > 0.0:
            converter.flush()
            buffer.append_silence(gap_s)
        converter.feed(frame)
    converter.flush()
    if buffer.seconds < 0.98 * duration_s - 0.5:
        frames.problems.append(f"{buffer.seconds:.2f} s of {duration_s:.2f} s could be decoded")
    return buffer.finish("; ".join(frames.problems) or None)


class _Frames:
    """Decoded frames of one stream; problems: what could not be decoded, complete when they have been iterated."""

    def __init__(self, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        from av.error import FFmpegError

        num_bad, reason = 0, ""
        for packet in self._packets(FFmpegError):
            try:
                yield from packet.decode()
            except FFmpegError as error:
                num_bad, reason = num_bad + 1, str(error.strerror)
        if num_bad:
            self.problems.insert(0, f"{num_bad} damaged parts left out: {reason}")

    def _packets(self, error_type: Any) -> Iterator[Any]:
        try:
            yield from self._container.demux(self._stream)
        except IndexError:
            return  # PyAV, at the end of a file in which another stream has begun on the way
        except error_type as error:
            self.problems.append(f"reading ends early: {error.strerror}")


class _Timeline:
    """Where each frame belongs, in seconds from the beginning of the file, by the timestamps that it has."""

    def __init__(self, container: Any, duration_s: float) -> None:
        self._origin_s = None if container.start_time is None else container.start_time / 1e6
        self._duration_s = duration_s
        self._is_bare = container.format.name in _BARE_FORMATS
        self._end_s = 0.0  # of the frames so far

    def gap_before(self, frame: Any) -> float:
        """Seconds of silence that belong before the frame."""
        gap_s = 0.0
        start_s = frame.time
        if start_s is not None and not self._is_bare:
            if self._origin_s is None:
                self._origin_s = start_s
            gap_s = start_s - self._origin_s - self._end_s
        # So is one beyond the end of a file that says how long it is.
        left_s = self._duration_s - self._end_s if self._duration_s else _LONGEST_GAP_S
        if not _LEAST_GAP_S < gap_s <= min(left_s, _LONGEST_GAP_S):
            gap_s = 0.0
        self._end_s += gap_s + frame.samples / frame.sample_rate
        return gap_s
