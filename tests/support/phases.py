"""Things that happen to an engine between the phases of its steps: callbacks, and forced preemptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

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
def at_phases(engine: Engine, callback: Callable[[str], None]) -> Iterator[None]:
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

    with (
        patch.object(scheduler, "schedule", telling_schedule),
        patch.object(runner, "execute_model", telling_execute),
        patch.object(runner, "sample_tokens", telling_sample),
        patch.object(engine, "step", telling_step),
    ):
        yield


@contextmanager
def pushing_out(engine: Engine, length: int) -> Iterator[list[int]]:
    """Preempt each request once, in the first step in which it knows `length` tokens; gives the lengths."""
    scheduler, schedule = engine.scheduler, engine.scheduler.schedule
    pushed_out: list[int] = []

    def push_out_first() -> Any:
        for slot in scheduler._slots.running().tolist():
            request = scheduler._slots.requests_np[slot]
            if request.num_preemptions == 0 and request.num_tokens >= length:
                pushed_out.append(request.num_tokens)
                scheduler._preempt(request)
        return schedule()

    with patch.object(scheduler, "schedule", push_out_first):
        yield pushed_out
