"""Callbacks between the phases of an engine's step, where a caller of another thread of thought may come in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from core_runner import Engine

PHASES = (
    "after schedule",
    "after execute_model",
    "after sample_tokens",
    "before get_output",
    "after get_output",
    "after update",
)


class _Output:
    """An `AsyncOutput` that tells when it is read."""

    def __init__(self, output: Any, tell: Callable[[str], None]) -> None:
        self._output, self._tell = output, tell

    def get_output(self) -> Any:
        self._tell("before get_output")
        result = self._output.get_output()
        self._tell("after get_output")
        return result


@contextmanager
def at_phases(engine: Engine, callback: Callable[[str], None]) -> Any:
    """Call `callback(phase)` at every phase of `engine.step` while entered; "after update" is between steps."""
    scheduler, runner = engine.scheduler, engine.runner
    schedule, execute_model, sample_tokens = scheduler.schedule, runner.execute_model, runner.sample_tokens
    step = engine.step

    def telling_schedule() -> Any:
        scheduled = schedule()
        callback("after schedule")
        return scheduled

    def telling_execute(scheduler_output: Any) -> None:
        execute_model(scheduler_output)
        callback("after execute_model")

    def telling_sample() -> Any:
        output = sample_tokens()
        callback("after sample_tokens")
        return None if output is None else _Output(output, callback)

    def telling_step() -> Any:
        updates = step()
        callback("after update")
        return updates

    scheduler.schedule, runner.execute_model = telling_schedule, telling_execute
    runner.sample_tokens, engine.step = telling_sample, telling_step
    try:
        yield
    finally:
        del scheduler.schedule, runner.execute_model, runner.sample_tokens, engine.step
