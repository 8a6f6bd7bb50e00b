"""How a command ends when something goes wrong: one line on stderr and an exit code, not a traceback.

Exit codes: 1 a request or the machine failed, 2 the caller can mend it, 130 Ctrl-C, 141 the reader went away.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from core_runner.cli import DEBUG_KEY

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


@contextmanager
def reported(ctx: click.Context) -> Iterator[None]:
    """Turn what a person meets in everyday use into a message and an exit code; let bugs show themselves."""
    try:
        yield
        sys.stdout.flush()
    except BaseException as error:
        code = _exit_code(error)
        if code is None:
            raise
        if code == BROKEN_PIPE:
            _point_stdout_nowhere()
            ctx.exit(code)
        if ctx.meta.get(DEBUG_KEY):
            traceback.print_exc()
        click.echo(_message(error, code), err=True)
        ctx.exit(code)


def _exit_code(error: BaseException) -> int | None:
    """The exit code of an end that needs no traceback; None for a fault of ours and click's own ways out."""
    from core_runner.errors import CoreRunnerError
    from model_states.errors import ModelStateError

    if _comes_of_interrupt(error):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, (CoreRunnerError, ModelStateError)):
        return USER_ERROR
    return FAILED if isinstance(error, OSError) else None


def _comes_of_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is at the bottom of it: a step that is cut off may fail once more while it unwinds."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _message(error: BaseException, code: int) -> str:
    if code != INTERRUPTED:
        return f"error: {error}"
    # A terminal has just echoed ^C in the middle of a line.
    return "\ninterrupted" if sys.stderr.isatty() else "interrupted"


def _point_stdout_nowhere() -> None:
    # The interpreter flushes stdout once more at exit and would complain about the pipe again.
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
