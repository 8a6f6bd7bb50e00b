"""Kernels that a check launches, compiled side by side before it.

A check launches one kernel after another, for what it finds decides what it looks at next, and a kernel that is only
compiled finds nothing. So it is rehearsed: once with torch twins in the place of kernels, which notes every error that
was measured, and once with launches that only compile and those same errors, so that it goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar

from model_states.kernels.compile_ahead import can_compile_ahead, compiling_ahead
from model_states.kernels.dispatch import torch_twins

_on_error: ContextVar[Callable[[float], float] | None] = ContextVar("on_error", default=None)


def rehearsed(error: float) -> float:
    """The error that was measured, or in the second rehearsal the one that the first had in its place."""
    on_error = _on_error.get()
    return error if on_error is None else on_error(error)


def rehearse(check: Callable[[], object]) -> None:
    """Have compiled what `check()` will launch; it must bear being called three times.

    Where it goes wrong, it does so again when it is called in earnest.
    """
    if not can_compile_ahead():
        return
    errors: list[float] = []

    def note(error: float) -> float:
        errors.append(error)
        return error

    with suppress(Exception):
        with torch_twins():
            _with(note, check)
        again = iter(errors)
        with compiling_ahead():
            _with(lambda _: next(again), check)


def _with(on_error: Callable[[float], float], check: Callable[[], object]) -> None:
    token = _on_error.set(on_error)
    try:
        check()
    finally:
        _on_error.reset(token)
