"""Ctrl-C at a moment that suits the work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """While entered, the first Ctrl-C is only noted, and the second raises `KeyboardInterrupt` at once.

    The owner calls `raise_if_due` after each result that it has written. That raises when `step`, which grows
    with each step of the engine, has grown: then all that the interrupted step finished is written.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._pending = False
        self._noticed_at: int | None = None
        self._previous: Any = None
        # Python runs signal handlers in the main thread alone, and only there can they be set.
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> DeferredInterrupt:
        if self._active:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous)

    def raise_if_due(self) -> None:
        """Raise the `KeyboardInterrupt` that was put off, once the step in which it came is over."""
        if not self._pending:
            return
        # Results of the interrupted step may still be on their way out, one call after another.
        if self._noticed_at is None:
            self._noticed_at = self._step()
        elif self._step() > self._noticed_at:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
