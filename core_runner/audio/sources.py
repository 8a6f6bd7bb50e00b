"""Where audio comes from: a path, bytes or a binary file, all read as one kind of file."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TypeAlias

import numpy as np
import numpy.typing as npt

from core_runner.errors import AudioError

Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes]"
Samples: TypeAlias = npt.NDArray[np.float32]

# Names that a directory is searched for; a file that is named itself may be called anything.
AUDIO_SUFFIXES = frozenset(
    ".3gp .aac .ac3 .aif .aifc .aiff .amr .au .avi .caf .flac .flv .m4a .m4b .m4v .mka .mkv .mov .mp2 .mp3 .mp4 .mpeg "
    ".mpg .mts .oga .ogg .ogv .opus .spx .ts .w64 .wav .wave .webm .wma .wmv".split()
)

_IN_MEMORY = 64 << 20  # bytes of a stream that are kept in memory; what is longer goes to a temporary file


def name_of(source: Source) -> str:
    """What messages call the source."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return f"audio of {len(source)} bytes"
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "an audio stream"


@contextmanager
def opened(source: Source) -> Iterator[IO[bytes]]:
    """The source as a binary file that can seek, at its beginning. Raises `AudioError` if there is no such file.

    A file object is read from where it stands, and stays open. One that cannot seek, such as a pipe, is copied first.
    """
    if isinstance(source, str | os.PathLike):
        with _open_path(source) as file:
            yield file
    elif isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
    elif hasattr(source, "read"):
        yield from _open_stream(source)
    else:
        raise AudioError(
            f"audio of type {type(source).__name__} is not a path, bytes or a file opened in binary mode"
        )


def _open_path(path: str | os.PathLike[str]) -> IO[bytes]:
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise AudioError(f"{os.fspath(path)}: cannot be read ({reason})") from error


def _open_stream(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    if isinstance(stream.read(0), str):
        raise AudioError(f"{name_of(stream)}: is opened as text; open it in binary mode ('rb')")
    # Decoders count from the beginning, so one that stands elsewhere is copied as well.
    if stream.seekable() and stream.tell() == 0:
        yield stream
        return
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as copy:
        shutil.copyfileobj(stream, copy, 1 << 20)
        copy.seek(0)
        yield copy
