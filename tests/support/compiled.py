"""A pytest plugin that compiles Triton kernels for an H200 on a machine that has no GPU: `-p support.compiled`.

    python -m pytest -p support.compiled --cases 4 tests/kernels tests/attention

The interpreter, in which kernels run on a CPU, takes much that the compiler refuses: shapes, layouts, types, names.
Under this plugin every launch compiles its kernel down to machine code, with the arguments that the test has, and runs
nothing. Whatever a test then makes of outputs that nobody has written does not count; a kernel that does not compile
fails it. A summary lists the kernels with how long they took and how many variants of each were compiled, and those of
the imported modules that no test launched. Triton's cache on disk serves as ever: what has not changed costs next to
nothing the second time. `--cases N` takes N cases of each test, from the first to the last; all of them take long.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from typing import Any, Final

# Chosen when a kernel is decorated, so it comes before anything of ours is imported.
os.environ["TRITON_INTERPRET"] = "0"

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET: Final = GPUTarget("cuda", 90, 32)  # sm_90, warps of 32 threads


class DoesNotCompile(BaseException):
    """A kernel that the compiler refuses. No `Exception`: nothing under test may take it for an error of its own."""


class AbsentDevice(CudaDriver):  # type: ignore[misc]
    """Triton's driver of a device that can be compiled for and nothing else."""

    def __init__(self) -> None:
        """Without what Triton's own does here, which is to load CUDA."""
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: divmod(TARGET.arch, 10)

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return TARGET


class Compiled:
    """What has been compiled: by name of the kernel its variants, and the seconds of its launches."""

    def __init__(self) -> None:
        self.variants: defaultdict[str, set[str]] = defaultdict(set)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._run = JITFunction.run

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """Stands in for `JITFunction.run`, and so for every launch."""
        name, started = kernel.__name__, time.perf_counter()
        try:
            compiled = self._run(kernel, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            raise DoesNotCompile(f"{name}: {type(error).__name__}: {error}") from error
        self.seconds[name] += time.perf_counter() - started
        self.variants[name].add(compiled.hash)
        return compiled

    def lines(self) -> list[str]:
        """A line for each kernel, the one that took longest first."""
        names = sorted(self.seconds, key=lambda name: -self.seconds[name])
        return [f"{self.seconds[name]:8.2f} s {len(self.variants[name]):5}  {name}" for name in names]


_COMPILED = Compiled()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of how much is compiled."""
    parser.addoption(
        "--cases", type=int, metavar="N", help="run N cases of each test, from its first to its last"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--cases` does."""
    most: int | None = config.getoption("--cases")
    if most is None:
        return
    tests: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[str(item.path), item.name.split("[")[0]].append(item)
    items[:] = [item for cases in tests.values() for item in _spread(cases, most)]


def _spread(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Up to `most` of them, evenly from the first to the last."""
    if len(cases) <= most:
        return cases
    return [cases[number * (len(cases) - 1) // max(most - 1, 1)] for number in range(most)]


def pytest_configure() -> None:
    """Have launches compile, before a kernel's module is imported."""
    driver.set_active(AbsentDevice())
    JITFunction.run = lambda kernel, *args, **options: _COMPILED.compile(kernel, *args, **options)
    from model_states.kernels import programmatic_launch

    def as_on_the_device(tensor: torch.Tensor) -> dict[str, Any]:
        return {"PDL": True, "launch_pdl": True}

    programmatic_launch.programmatic_launch = as_on_the_device


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Let a test pass whatever it makes of unwritten outputs; what does not compile, or is skipped, goes on."""
    try:
        return (yield)
    except (Exception, pytest.fail.Exception):
        return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the kernels."""
    terminalreporter.section(f"compiled for sm_{TARGET.arch}")
    for line in _COMPILED.lines():
        terminalreporter.line(line)
    num_variants = sum(map(len, _COMPILED.variants.values()))
    seconds = sum(_COMPILED.seconds.values())
    terminalreporter.line(f"{len(_COMPILED.seconds)} kernels, {num_variants} variants, {seconds:.1f} s")
    unmet = sorted(_imported_kernels() - _COMPILED.seconds.keys())
    if unmet:
        terminalreporter.line(f"not launched: {', '.join(unmet)}")


def _imported_kernels() -> set[str]:
    """Names of the kernels that modules hold; what kernels call has other names."""
    values = [value for module in list(sys.modules.values()) for value in list(vars(module).values())]
    names = {value.__name__ for value in values if isinstance(value, JITFunction)}
    return {name for name in names if name.endswith("_kernel")}
