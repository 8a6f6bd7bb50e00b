"""Progress bars on stderr: only for a person who watches, and gone when the work is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], None]


def _silent(_what: str, _done: int, _total: int) -> None:
    """Nobody watches."""


@contextmanager
def progress_bars(*, show: bool = True) -> Iterator[Report]:
    """Yield `report(what, done, total)`, which draws one bar for each `what`; total 0 is unknown.

    Draws nothing where stderr is no terminal. Leaving it, also by an exception, restores the cursor.
    """
    if not (show and sys.stderr.isatty()):
        yield _silent
        return
    # rich is imported for a person alone: a script in a pipe starts faster without it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total or None, count="")
        count = f"{done}/{total}" if total > 1 else ""
        bars.update(tasks[what], completed=done, total=total or None, count=count)

    with bars:
        yield report
