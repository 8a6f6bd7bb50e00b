"""Inside `compiling_ahead` a launch compiles and launches nothing; outside, it launches as before."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from model_states.kernels import compile_ahead


class Kernel:
    """Stands for Triton's compiled function, whose launches are calls of `run`."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []
        self.compiled: list[tuple[object, ...]] = []

    def run(self, *args: object, grid: object, warmup: bool, **options: object) -> None:
        (self.compiled if warmup else self.launches).append((*args, grid, options))

    def launch(self, *args: object) -> None:
        self.run(*args, grid=(1,), warmup=False, num_warps=4)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(compile_ahead, "JITFunction", Kernel)
    monkeypatch.setattr(compile_ahead, "AsyncCompileMode", lambda threads, ignore_errors: nullcontext())
    return Kernel()


def test_a_launch_inside_only_compiles(kernel: Kernel) -> None:
    kernel.launch("before")
    with compile_ahead.compiling_ahead():
        kernel.launch("inside")
    kernel.launch("after")
    assert [launch[0] for launch in kernel.launches] == ["before", "after"]
    assert kernel.compiled == [("inside", (1,), {"num_warps": 4})]


def test_an_error_inside_leaves_launches_as_they_were(kernel: Kernel) -> None:
    with pytest.raises(KeyError), compile_ahead.compiling_ahead():
        raise KeyError("a step of padding failed")
    kernel.launch("after")
    assert len(kernel.launches) == 1


def test_the_interpreter_compiles_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert not compile_ahead.can_compile_ahead()
