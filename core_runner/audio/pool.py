"""`AudioPool`: many sources decoded at once, from threads, without holding up the thread that steps the engine."""

from __future__ import annotations

import os
import sys
from queue import LifoQueue
from types import TracebackType

from core_runner.audio.load import decode_source, needs_av, take_samples
from core_runner.audio.process import DecodeProcess
from core_runner.audio.sources import Samples, Source, name_of
from core_runner.errors import AudioError


class AudioPool:
    """As many processes as there are cores, each started when the ones before it are busy; from any thread.

    Pays where several files are decoded, since a process takes a few tenths of a second to start. WAV files that need
    no resampling are read by the calling thread.
    """

    def __init__(self, num_processes: int | None = None) -> None:
        """num_processes: None is one for each core."""
        self._processes = [DecodeProcess() for _ in range(num_processes or _num_cores())]
        self._idle: LifoQueue[DecodeProcess] = LifoQueue()
        for process in self._processes:
            self._idle.put(process)
        self._closed = False

    def load(self, source: Source, sampling_rate: int) -> Samples:
        """As `load_audio`; waits while every process is busy."""
        if not (sys.executable and needs_av(source, sampling_rate)):
            return take_samples(source, decode_source(source, sampling_rate))
        process = self._idle.get()
        try:
            if self._closed:
                raise AudioError(f"{name_of(source)}: was not read, since the call was given up")
            decoded = process.decode(source, sampling_rate)
        finally:
            self._idle.put(process)
        return take_samples(source, decoded)

    def close(self) -> None:
        """End the processes; who waits for one, or for a file in one, gets an `AudioError`."""
        self._closed = True
        for process in self._processes:
            process.close()

    def __enter__(self) -> AudioPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # which macOS does not have
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
