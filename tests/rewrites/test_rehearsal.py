"""A rehearsed check goes the same way when its kernels are only compiled, and what it decides is decided in earnest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.one_row import hidden_states, load_state, tiny_state

from model_states.kernels import act_mul, add_norm, compile_ahead, linear, rope_write
from model_states.kernels.dispatch import _twins_only, torch_twins, use_triton
from model_states.rewrites import fuse, rehearsal
from model_states.rewrites.seen import close


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether launches only compile now: its length says how often they were about to."""
    states: list[bool] = []

    @contextmanager
    def compiling_ahead() -> Iterator[None]:
        states.append(True)
        yield
        states[-1] = False

    monkeypatch.setattr(rehearsal, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(rehearsal, "compiling_ahead", compiling_ahead)
    return states


def test_the_second_rehearsal_goes_the_way_of_the_first(compiling: list[bool]) -> None:
    ways: list[list[int]] = []

    def check() -> None:
        wanted, ways_so_far = torch.ones(4), []
        for number in range(3):
            ways_so_far.append(number)
            # What a kernel that was only compiled would have left there is of no use.
            got = torch.full((4,), float("nan")) if compiling else wanted * (number == 1)
            if close(got, wanted):
                break
        ways.append(ways_so_far)

    rehearsal.rehearse(check)
    assert ways == [[0, 1], [0, 1]]
    check()
    assert ways[-1] == [0, 1, 2]  # in earnest the numbers count


def test_twins_stand_in_for_kernels_in_the_first_alone(compiling: list[bool]) -> None:
    on_gpu = Mock(spec=torch.Tensor, is_cuda=True)
    pytest.importorskip("triton")
    found: list[tuple[bool, bool]] = []
    rehearsal.rehearse(lambda: found.append((bool(compiling), use_triton(on_gpu))))
    assert found == [(False, False), (True, True)]
    assert use_triton(on_gpu)
    with torch_twins():
        assert not use_triton(on_gpu)
    assert use_triton(on_gpu)


@pytest.mark.parametrize("first_goes_wrong", [True, False])
def test_a_rehearsal_that_fails_is_forgotten(compiling: list[bool], first_goes_wrong: bool) -> None:
    def check() -> None:
        close(torch.ones(2), torch.ones(2))
        if first_goes_wrong or compiling:
            raise RuntimeError

    rehearsal.rehearse(check)
    assert not close(torch.ones(2), torch.zeros(2))
    assert close(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "granite"])
def test_a_rehearsed_model_is_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiling: list[bool]
) -> None:
    expected = hidden_states(tiny_state(name, tmp_path))
    launched = []

    def rehearse_here(model: object, seen: fuse._Pass, *rest: object) -> list[object]:
        backbone = launch_all(model, seen, *rest)
        launched.append(bool(compiling))
        return backbone

    launch_all = fuse._launch_all
    monkeypatch.setattr(fuse, "_launch_all", rehearse_here)
    monkeypatch.setattr(fuse, "_on_gpu", lambda model: True)
    state = load_state(tmp_path)
    assert launched == [False, True]
    assert state.model.fused is not None
    assert torch.equal(hidden_states(state), expected)


def test_only_a_loop_of_known_layers_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rehearsed is all that a check of a whole model launches: each way of each part."""
    runs = []
    monkeypatch.setattr(fuse, "_ways", lambda backbone: runs.append(len(backbone.layers)) or [])
    monkeypatch.setattr(fuse, "rehearse", lambda check: check())
    monkeypatch.setattr(fuse, "_on_gpu", lambda model: True)
    tiny_state("qwen3", tmp_path)
    assert runs[0] == 1
    assert runs[1] > 1


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "phi3"])
def test_all_that_is_launched_was_rehearsed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiling: list[bool]
) -> None:
    """In a model whose layers are of one kind; made of the twins, which note a launch, and write nothing meanwhile."""
    tiny_state(name, tmp_path, fused_layers=False)
    launches: dict[bool, set[object]] = {True: set(), False: set()}

    def noted(op: str, twin: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def launch(*args: object, **kwargs: object) -> torch.Tensor | None:
            only_compiles = bool(compiling) and compiling[-1]
            launches[only_compiles].add((op, *map(_form_of, (*args, *kwargs.values()))))
            if not only_compiles:
                return twin(*args, **kwargs)
            return None if op != "linear" else torch.full_like(twin(*args, **kwargs), torch.nan)

        return launch

    for module in (act_mul, add_norm, linear, rope_write):
        op = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, f"{op}_triton", noted(op, getattr(module, f"{op}_torch")))
        monkeypatch.setattr(module, "use_triton", lambda _: not _twins_only.get())
    monkeypatch.setattr(fuse, "_on_gpu", lambda model: True)
    load_state(tmp_path, dtype=torch.bfloat16)
    assert len(launches[False]) >= 3
    assert launches[False] <= launches[True]


def _form_of(value: object) -> object:
    """What decides which kernel is compiled: shapes and dtypes of tensors, other values themselves."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if is_dataclass(value):
        return tuple(_form_of(getattr(value, field.name)) for field in fields(value))
    return tuple(map(_form_of, value)) if isinstance(value, tuple) else value


def test_threads_that_start_something_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = Mock(is_alive=lambda: True)
    compile_ahead.await_before_forks(thread)
    monkeypatch.setattr(compile_ahead, "AsyncCompileMode", Mock(side_effect=KeyError))
    with pytest.raises(KeyError), compile_ahead.compiling_ahead():
        """Nothing gets here."""
    thread.join.assert_called_once_with()
