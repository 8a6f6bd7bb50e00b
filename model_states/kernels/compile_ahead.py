"""Compile the kernels of a step side by side, before the first one is launched.

A kernel takes Triton a quarter of a second, and a step has some dozens. Much of that is Python, so threads get in each
other's way; forked processes do not. They compile into Triton's cache on disk, out of which this process then takes
what it needs. Where everything is in that cache already, nothing is forked.
"""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from threading import Thread, get_ident
from typing import Any

from model_states.kernels.triton_import import triton

try:
    from triton.runtime import JITFunction, driver
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:
    AsyncCompileMode = None

Job = Callable[[], Any]
_MOST_SECONDS = 60  # that a forked process may take, whatever becomes of it
_NUMBER_BYTES = 2
_awaited: list[Thread] = []


def can_compile_ahead() -> bool:
    """Whether this Triton compiles in the background; the interpreter compiles nothing."""
    return AsyncCompileMode is not None and not triton.knobs.runtime.interpret


def await_before_forks(thread: Thread) -> None:
    """Have whoever compiles ahead wait for this thread first: what it holds, a fork would hold for ever."""
    _awaited[:] = [other for other in _awaited if other.is_alive()] + [thread]


class Compiler(Executor):
    """Runs what Triton hands over: at once while each kernel is in its cache; from the first one on that was not,
    `finish` has the others compiled by processes.
    """

    def __init__(self) -> None:
        self.is_cold = False
        self._waiting: list[tuple[Future[Any], Job]] = []

    def submit(self, fn: Job, /, *_: Any, **__: Any) -> Future[Any]:
        """The kernel that fn() makes, now or after `finish`."""
        future: Future[Any] = Future()
        self._waiting.append((future, fn))
        if not self.is_cold:
            self._settle()
        return future

    def finish(self) -> None:
        """Make the kernels that wait."""
        in_processes([_with_launcher(job) for _, job in self._waiting])
        self._settle()

    def give_up(self) -> None:
        """Make nothing of what waits."""
        for future, _ in self._waiting:
            future.set_exception(RuntimeError("the step was not finished"))
        self._waiting = []

    def note(self, *, cache_hit: bool, **_: Any) -> None:
        """Triton's word on a kernel that has been made."""
        self.is_cold |= not cache_hit

    def _settle(self) -> None:
        for future, job in self._waiting:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
        self._waiting = []


def in_processes(jobs: Sequence[Job]) -> None:
    """Run the jobs in forked processes, as many at once as there are cores; what they return is lost.

    A job must not use the device, which is this process's. What fails is left to whoever does it again.
    """
    if len(jobs) < 2 or not hasattr(os, "fork"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes: list[int] = []
    # Some kernels take ten times as long as others, so whoever is done takes the next one: a pipe holds their numbers.
    waiting, end = os.pipe()
    try:
        os.write(end, b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in range(len(jobs))))
    finally:
        os.close(end)
    with suppress(OSError):  # no memory, or no more processes
        for _ in range(min(cores, len(jobs))):
            processes.append(_fork(jobs, waiting))
    os.close(waiting)
    for process in processes:
        with suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(process, 0)


def _fork(jobs: Sequence[Job], waiting: int) -> int:
    with warnings.catch_warnings():
        # Other threads may hold a lock for ever in the new process, which therefore has a limited time.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    try:
        gc.disable()  # what it would collect may give something back to the device, which is not this process's
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MOST_SECONDS)
        while number := os.read(waiting, _NUMBER_BYTES):
            with suppress(Exception):
                jobs[int.from_bytes(number, "big")]()
    finally:
        os._exit(0)  # without what this process's exit would do, to the device above all


def _with_launcher(job: Job) -> Job:
    """The job, and the C code that launches its kernel, which the first launch would compile."""

    def run() -> Any:
        kernel = job()
        with suppress(Exception):  # the launch tells
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    return run


@contextmanager
def compiling_ahead() -> Iterator[Compiler]:
    """Inside, a launch has its kernel compiled and launches nothing; leaving waits until all are compiled.

    What kernels would have written is not written, so only steps whose results nobody looks at belong in here. A
    kernel that fails to compile fails again, loudly, where it is needed. Other threads launch as before.
    """
    while _awaited:
        _awaited.pop().join()
    run, compiler, listener = JITFunction.run, Compiler(), triton.knobs.compilation.listener
    own = get_ident()

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=warmup or get_ident() == own, **options)

    def listen(**compiled: Any) -> None:
        compiler.note(**compiled)
        if listener is not None:
            listener(**compiled)

    with AsyncCompileMode(compiler, ignore_errors=True):
        JITFunction.run, triton.knobs.compilation.listener = only_compile, listen
        try:
            yield compiler
            compiler.finish()
        finally:
            compiler.give_up()
            JITFunction.run, triton.knobs.compilation.listener = run, listener
