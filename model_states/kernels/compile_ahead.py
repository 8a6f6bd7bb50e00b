"""Compile the kernels of a step side by side, before the first one is launched.

Each kernel takes Triton a good part of a second, nearly all of it outside Python, and a step has some dozens. Met one
after another they are most of what a first start waits for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from model_states.kernels.triton_import import triton

try:
    from triton.runtime import JITFunction
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:
    AsyncCompileMode = None


def can_compile_ahead() -> bool:
    """Whether this Triton compiles in the background; the interpreter compiles nothing."""
    return AsyncCompileMode is not None and not triton.knobs.runtime.interpret


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, a launch has its kernel compiled and launches nothing; leaving waits until all are compiled.

    What kernels would have written is not written, so only steps whose results nobody looks at belong in here. A
    kernel that fails to compile fails again, loudly, where it is needed.
    """
    run = JITFunction.run

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    with (
        ThreadPoolExecutor(os.cpu_count()) as threads,
        AsyncCompileMode(threads, ignore_errors=True),
    ):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = run
