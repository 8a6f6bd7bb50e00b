"""Inside `compiling_ahead` a launch compiles and launches nothing; outside, it launches as before."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

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
    monkeypatch.setattr(compile_ahead, "AsyncCompileMode", lambda compiler, ignore_errors: nullcontext())
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


class Cache:
    """Kernels on disk, as Triton keeps them, and who made each."""

    def __init__(self, directory: Path, compiler: compile_ahead.Compiler) -> None:
        self.directory, self.compiler = directory, compiler

    def job(self, name: str, fails: bool = False) -> Callable[[], int]:
        def run() -> int:
            path = self.directory / name
            self.compiler.note(cache_hit=path.exists())
            if fails:
                raise ValueError(name)
            if not path.exists():
                path.write_text(str(os.getpid()))
            return int(path.read_text())

        return run


def test_the_first_kernel_that_is_missing_has_the_others_made_elsewhere(tmp_path: Path) -> None:
    compiler = compile_ahead.Compiler()
    cache = Cache(tmp_path, compiler)
    (tmp_path / "kept").write_text("7")
    kept = compiler.submit(cache.job("kept"))
    assert kept.result(0) == 7
    assert not compiler.is_cold
    missing = compiler.submit(cache.job("missing"))
    assert missing.result(0) == os.getpid()
    assert compiler.is_cold
    others = [compiler.submit(cache.job(name, name == "bad")) for name in ("a", "bad", "b", "c")]
    assert not any(future.done() for future in others)
    compiler.finish()
    made_by = [future.result(0) for future in others if future.exception(0) is None]
    assert len(made_by) == 3
    assert os.getpid() not in made_by
    with pytest.raises(ValueError, match="bad"):
        others[1].result(0)


def test_each_job_is_done_once_by_whoever_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))

    def note(number: int) -> None:
        with (tmp_path / str(number)).open("a") as file:
            file.write(f"{os.getpid()}\n")

    compile_ahead.in_processes([lambda n=n: note(n) for n in range(300)])
    lines = [(tmp_path / str(number)).read_text().splitlines() for number in range(300)]
    assert {len(each) for each in lines} == {1}
    assert 1 <= len({each[0] for each in lines} - {str(os.getpid())}) <= 3


def test_a_process_that_dies_leaves_its_kernels_to_this_one(tmp_path: Path) -> None:
    compiler, own = compile_ahead.Compiler(), os.getpid()
    cache = Cache(tmp_path, compiler)
    compiler.note(cache_hit=False)

    def dies_elsewhere() -> int:
        if os.getpid() != own:
            os._exit(1)
        return 3

    futures = [compiler.submit(dies_elsewhere), *(compiler.submit(cache.job(f"{i}")) for i in range(5))]
    compiler.finish()
    assert futures[0].result(0) == 3
    assert all(future.result(0) > 0 for future in futures[1:])


def test_a_machine_that_forks_no_more_compiles_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    compiler = compile_ahead.Compiler()
    cache = Cache(tmp_path, compiler)
    compiler.note(cache_hit=False)
    futures = [compiler.submit(cache.job(name)) for name in "abc"]
    compiler.finish()
    assert {future.result(0) for future in futures} == {os.getpid()}


def test_what_waits_is_given_up_with_an_error(tmp_path: Path) -> None:
    compiler = compile_ahead.Compiler()
    compiler.note(cache_hit=False)
    future = compiler.submit(Cache(tmp_path, compiler).job("never"))
    compiler.give_up()
    assert future.exception(0) is not None
    assert not list(tmp_path.iterdir())


def test_listeners_are_put_back(kernel: Kernel) -> None:
    triton = pytest.importorskip("triton")
    before = triton.knobs.compilation.listener
    with compile_ahead.compiling_ahead() as compiler:
        triton.knobs.compilation.listener(cache_hit=False, src=None)
    assert compiler.is_cold
    assert triton.knobs.compilation.listener is before


def test_the_interpreter_compiles_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert not compile_ahead.can_compile_ahead()
