"""The model of a command: loaded, shown while it loads, closed at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from core_runner.cli.options import MODEL_OPTIONS
from core_runner.cli.sections import given

if TYPE_CHECKING:
    from core_runner.llm import LLM


@contextmanager
def opened_model(options: dict[str, Any]) -> Iterator[tuple[LLM, float]]:
    """The loaded model and the seconds that took.

    Closing runs the engine until nothing is in flight. After Ctrl-C in the middle of a step that cannot be
    done, nor is it worth the wait: the process is about to end.
    """
    from core_runner.cli.progress import progress_bars

    started = time.perf_counter()
    with progress_bars() as report:
        report("Starting", 0, 0)
        # Importing torch takes seconds, in which a person should see that something happens.
        from core_runner import LLM

        report("Starting", 1, 1)
        llm = LLM(**given(options, MODEL_OPTIONS), progress=report)
    yield llm, time.perf_counter() - started
    llm.close()
