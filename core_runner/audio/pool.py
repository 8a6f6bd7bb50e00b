"""`AudioPool`: many sources decoded at once, from threads, without holding up the thread that steps the engine."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from core_runner.audio.load import decode_source, take_samples, takes_long
from core_runner.audio.process import Allocate, DecodeProcess, ProcessEndedError, new_array
from core_runner.audio.sources import Samples, Source, name_of
from core_runner.errors import AudioError

# At a file, each in a process of its own: the first one may have been ended by something else.
_ATTEMPTS: Final = 2


class AudioPool:
    """As many processes as there are cores, each started when the ones before it are busy; from any thread.

    They stay until `close`, or until nobody has the pool any more, and end with this process. WAV files that need no
    resampling are read by the calling thread.
    """

    def __init__(self, num_processes: int | None = None, allocate: Allocate = new_array) -> None:
        """num_processes: None is one for each core. allocate: memory for the samples that processes decode."""
        self._processes = [DecodeProcess(allocate) for _ in range(num_processes or _num_cores())]
        self._idle = list(reversed(self._processes))
        self._changed = threading.Condition()
        self._readers: weakref.WeakSet[AudioReader] = weakref.WeakSet()
        weakref.finalize(self, _close_all, self._processes)

    def reader(self, num_sources: int) -> AudioReader:
        """For one call of so many sources. A single one is read by the calling thread if no process runs yet."""
        is_in_thread = num_sources == 1 and not any(process.is_running for process in self._processes)
        reader = AudioReader(self, is_in_thread=is_in_thread)
        with self._changed:
            self._readers.add(reader)
        return reader

    def load(self, source: Source, sampling_rate: int) -> Samples:
        """As `load_audio`; waits while every process is busy."""
        with self.reader(2) as reader:
            return reader.load(source, sampling_rate)

    def close(self) -> None:
        """End the processes, and what is being read; they start again for what is read later."""
        with self._changed:
            readers = list(self._readers)
        for reader in readers:
            reader.close()
        _close_all(self._processes)

    def take(self, is_given_up: Callable[[], bool]) -> DecodeProcess | None:
        """A process that is the caller's until `put`, once there is one; None if the call is given up before."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or is_given_up())
            return None if is_given_up() else self._idle.pop()

    def put(self, process: DecodeProcess) -> None:
        """The next one taken: processes that have not started are taken last."""
        with self._changed:
            self._idle.append(process)
            self._changed.notify()

    def wake(self) -> None:
        """Have those who wait look whether they are given up."""
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> AudioPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AudioReader:
    """What one call reads with, from any thread; closing gives up its own files and nobody else's."""

    def __init__(self, pool: AudioPool, *, is_in_thread: bool) -> None:
        """is_in_thread: whatever the sources are, the calling thread reads them."""
        self._pool, self._is_in_thread = pool, is_in_thread
        self._busy: set[DecodeProcess] = set()
        self._is_closed = False

    def load(self, source: Source, sampling_rate: int) -> Samples:
        """As `load_audio`; an `AudioError` for what was given up."""
        if self._is_in_thread or not (sys.executable and takes_long(source, sampling_rate)):
            return take_samples(source, decode_source(source, sampling_rate))
        for _ in range(_ATTEMPTS):
            process = self._pool.take(lambda: self._is_closed)
            if process is None:
                break
            try:
                return self._load_in(process, source, sampling_rate)
            except ProcessEndedError as error:
                status = error.status
        if self._is_closed:
            raise AudioError(f"{name_of(source)}: was not read, since the call was given up")
        raise AudioError(
            f"{name_of(source)}: the decoder ended on it (exit status {status}); convert it first"
        )

    def close(self) -> None:
        """Who waits for a process, or for a file in one, gets an `AudioError`."""
        self._is_closed = True
        for process in list(self._busy):
            process.close()
        self._pool.wake()

    def _load_in(self, process: DecodeProcess, source: Source, sampling_rate: int) -> Samples:
        self._busy.add(process)
        try:
            if self._is_closed:  # since the process was taken: nobody would end it
                raise ProcessEndedError(None)
            decoded = process.decode(source, sampling_rate)
        finally:
            self._busy.discard(process)
            self._pool.put(process)
        return take_samples(source, decoded)

    def __enter__(self) -> AudioReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_all(processes: Sequence[DecodeProcess]) -> None:
    for process in processes:
        process.close()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # which macOS does not have
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
