"""Decoding in a process of its own: PyAV needs the interpreter lock for every frame, so that threads take turns.

What crosses the pipes: a request is a pickle of (source, sampling_rate); an answer is a pickle of (number of samples,
damage), or of an error's text. The samples lie in a file without a name that both processes have open, so that one call
takes them all: a pipe holds a few at a time, and each time a thread of ours would want the interpreter lock, from the
one that steps the engine.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Final

import numpy as np

from core_runner.audio.buffer import Decoded
from core_runner.audio.load import decode_source
from core_runner.audio.sources import Samples, Source
from core_runner.errors import AudioError

# Makes an array float32 of a shape, for samples.
Allocate = Callable[[Sequence[int]], Samples]

_KEPT_BYTES: Final = 1 << 24  # of a file that is used again and again
# For glibc, which would give back the memory of every block of samples, and get it again page by page: that takes a
# fourth of the time.
_KEEP_MEMORY: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 27)}
# There is a process for every core already; a library of products would start a thread for every core in each of them.
_ONE_THREAD: Final = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
# With this process's import paths. Unlike multiprocessing, it does not run the caller's main module, which may have no
# guard.
_START: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; from core_runner.audio.process import serve; "
    "serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))"
)


def new_array(shape: Sequence[int]) -> Samples:
    """Ordinary memory."""
    return np.empty(tuple(shape), np.float32)


class ProcessEndedError(Exception):
    """The process ended before it answered. status: what it ended with, where that is known."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


class DecodeProcess:
    """Starts when it is first asked; one that has ended is replaced at the next. One thread at a time may `decode`."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()  # of the two below, which change together
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._samples: io.FileIO | None = None  # what the process writes them to

    @property
    def is_running(self) -> bool:
        """Whether it has been started, and nobody has noticed that it ended."""
        return self._process is not None

    def decode(self, source: Source, sampling_rate: int) -> Decoded:
        """As `load.decode_source`. Raises `ProcessEndedError` where the process dies of it, or had died before."""
        process, file = self._ensure_running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((_portable(source), sampling_rate), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
            if isinstance(answer, str):
                raise AudioError(answer)
            num_samples, damage = answer
            samples = self._allocate((num_samples,))
            _read_into(file, samples.view(np.uint8).data)
        except AudioError:
            raise
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:  # ValueError: a closed pipe
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)  # for the status that it ends with by itself
            self._end(process)
            raise ProcessEndedError(process.returncode) from error
        return Decoded(samples, damage)

    def close(self) -> None:
        """End it, in the middle of a file too; from any thread."""
        process = self._process
        if process is not None:
            self._end(process)

    def _ensure_running(self) -> tuple[subprocess.Popen[bytes], io.FileIO]:
        """The process, started anew if it is not there any more, and the file that it writes to."""
        if self._owner != os.getpid():  # in a fork: the process is the parent's, and so may be the lock
            self._owner, self._lock, self._process = os.getpid(), threading.Lock(), None
        process = self._process
        if process is not None and process.poll() is not None:
            self._end(process)
        with self._lock:
            if self._process is None:
                self._process = self._start()
            assert self._samples is not None
            return self._process, self._samples

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._process is process:  # else somebody has started another
                self._process = self._samples = None
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stdin):
            assert pipe is not None
            with suppress(OSError, ValueError):  # half a request may be left in it, or somebody closes it too
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._samples = _nameless_file()
        number = self._samples.fileno()
        # In a session of its own, Ctrl-C is for us; it ends when its standard input does.
        return subprocess.Popen(
            [sys.executable, "-c", _START, str(number), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(number,),
            env={**_KEEP_MEMORY, **os.environ, **_ONE_THREAD},
            start_new_session=True,
        )


def serve(requests: IO[bytes], answers: IO[bytes], samples: int) -> None:
    """The process: answer every request until there are no more. samples: descriptor of the file for them."""
    while True:
        try:
            source, sampling_rate = pickle.load(requests)
        except EOFError:
            return
        try:
            decoded = decode_source(source, sampling_rate)
        except AudioError as error:
            pickle.dump(str(error), answers)
        else:
            answer = len(decoded.samples), decoded.damage
            _write_from(samples, decoded.samples.view(np.uint8).data)
            del decoded  # an hour is 230 MB, which the other process takes now
            pickle.dump(answer, answers)
        answers.flush()


def _portable(source: Source) -> str | bytes:
    return os.fspath(source) if isinstance(source, str | os.PathLike) else bytes(source)  # type: ignore[arg-type]


def _nameless_file() -> io.FileIO:
    """In memory where the system has that."""
    if hasattr(os, "memfd_create"):
        return io.FileIO(os.memfd_create("core-runner-samples"), "r+")
    with tempfile.TemporaryFile() as file:
        return io.FileIO(os.dup(file.fileno()), "r+")


def _write_from(file: int, source: memoryview) -> None:
    """To the beginning of the file."""
    place = 0
    while place < len(source):
        place += os.pwrite(file, source[place:], place)


def _read_into(file: io.FileIO, target: memoryview) -> None:
    """From the beginning of the file, which is emptied if that was much."""
    num_bytes = len(target)
    file.seek(0)
    while target:
        num_read = file.readinto(target)
        if not num_read:
            raise EOFError
        target = target[num_read:]
    if num_bytes > _KEPT_BYTES:
        file.truncate(0)
