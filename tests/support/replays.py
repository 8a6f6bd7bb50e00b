"""Whole-step graphs on a CPU: what was recorded is run again with every host value as it was at the recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch

T = TypeVar("T")


class HostRecorder:
    """A `Recorder` whose replays call the recorded function with the objects that it held then.

    As with a CUDA graph, whatever the host knew at the recording is frozen, and only the contents of buffers differ.
    """

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        self.device = device

    def record(self, body: Callable[[], T]) -> Callable[[], T]:
        return body

    def free_bytes(self) -> int:
        return 0


@contextmanager
def replayed_steps() -> Iterator[None]:
    """Engines that are built in here record their steps, on a CPU too."""
    with (
        patch("core_runner.runner.use_graphs", lambda config, state: config.cuda_graphs is not False),
        patch("core_runner.runner.CudaRecorder", HostRecorder),
    ):
        yield
