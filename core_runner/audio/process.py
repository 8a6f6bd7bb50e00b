"""Decoding in a process of its own: PyAV needs the interpreter lock for every frame, so that threads take turns.

What crosses the pipes: a request is a pickle of (source, sampling_rate); an answer is a pickle of (number of samples,
damage) and the samples as they lie in memory, or of an error's text.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from typing import IO, Final

import numpy as np

from core_runner.audio.buffer import Decoded
from core_runner.audio.load import decode_source
from core_runner.audio.sources import Source, name_of
from core_runner.errors import AudioError

_PIPE_BYTES: Final = 1 << 20
# With this process's import paths. Unlike multiprocessing, it does not run the caller's main module, which may have no
# guard.
_START: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; from core_runner.audio.process import serve; "
    "serve(sys.stdin.buffer, sys.stdout.buffer)"
)


class DecodeProcess:
    """Starts when it is first asked; one that a file brings down is replaced at the next. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, source: Source, sampling_rate: int) -> Decoded:
        """As `load.decode_source`; `AudioError` also where the process dies of it."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((_portable(source), sampling_rate), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
            if isinstance(answer, str):
                raise AudioError(answer)
            num_samples, damage = answer
            samples = np.empty(num_samples, dtype=np.float32)
            _read_into(process.stdout, samples.view(np.uint8).data)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)  # for the status that it ends with by itself
            self.close()
            raise AudioError(
                f"{name_of(source)}: the decoder ended on it (exit status {process.returncode}); convert it first"
            ) from error
        return Decoded(samples, damage)

    def close(self) -> None:
        """End it, in the middle of a file too; from any thread."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.close()
            with suppress(OSError):  # half a request may be left in it
                process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # In a session of its own, Ctrl-C is for us; it ends when its standard input does.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pipesize=_PIPE_BYTES,
            start_new_session=True,
        )
        return self._process


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The process: answer every request until there are no more."""
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
            pickle.dump((len(decoded.samples), decoded.damage), answers)
            answers.write(decoded.samples.view(np.uint8).data)
        answers.flush()


def _portable(source: Source) -> str | bytes:
    return os.fspath(source) if isinstance(source, str | os.PathLike) else bytes(source)  # type: ignore[arg-type]


def _read_into(file: IO[bytes], target: memoryview) -> None:
    while target:
        num_bytes = file.readinto(target)  # type: ignore[attr-defined]
        if not num_bytes:
            raise EOFError
        target = target[num_bytes:]
