"""Ctrl-C at a moment that suits the work."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """While entered, the first Ctrl-C only sets `pending`, and the second raises `KeyboardInterrupt` at once.

    The owner reads `pending` between two steps, so that what a step has finished is written before the end.
    """

    def __init__(self) -> None:
        self.pending = False
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

    def raise_if_pending(self) -> None:
        """Raise the `KeyboardInterrupt` that was put off."""
        if self.pending:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
