"""Recording launches as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

_T = TypeVar("_T")


class Recorder(Protocol):
    """Makes graphs; tests bring one that works without a GPU."""

    def record(self, body: Callable[[], _T]) -> Callable[[], _T]:
        """Record the launches of `body` without running them; the result launches them again.

        Raises RuntimeError where they cannot be recorded.
        """

    def free_bytes(self) -> int:
        """Device memory that nobody holds."""


class CudaRecorder:
    """Graphs that share one memory pool: one runs at a time, in stream order.

    Kernels of an urgent one go before those of others that are launched and not begun, whatever the stream.
    """

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
        self._pool: Any = None

    def record(self, body: Callable[[], _T]) -> Callable[[], _T]:
        """See `Recorder.record`. The result of a replay is overwritten by the next replay of any graph."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        collects = gc.isenabled()
        gc.disable()  # what a collection would free may not be freed during a recording
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = body()
                finally:
                    graph.capture_end()
        except BaseException:
            # torch goes on taking it for the pool of that recording, and refuses further ones.
            self._pool = None
            raise
        finally:
            if collects:
                gc.enable()
        current.wait_stream(self._stream)
        self._pool = graph.pool()

        def replay() -> _T:
            graph.replay()
            return result

        return replay

    def free_bytes(self) -> int:
        """See `Recorder.free_bytes`."""
        return torch.cuda.mem_get_info(self._device)[0]
