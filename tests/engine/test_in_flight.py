"""Aborts, ends and preemptions while a step is in flight, whose slot and blocks are wanted at once (report B-03)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.drained import Drained
from support.replays import replayed_steps
from support.tiny_models import save_tiny
from support.tiny_recurrent import retraced_reference
from support.toy_model import ToyPlugin, ToyTable, save_toy
from support.traffic import CASES, EOS, TIGHT, Traffic, check_one_further_step, check_replacing, sizes

SLOW = pytest.mark.slow
TOY = [
    pytest.param(
        *case,
        is_recorded,
        id=f"{name}, {'recorded' if is_recorded else 'eager'}",
        marks=SLOW if is_recorded and name != "abort" else (),
    )
    for is_recorded in (False, True)
    for name, case in CASES.items()
]
REAL = [pytest.param(*case, id=name, marks=SLOW if case[0] == TIGHT else ()) for name, case in CASES.items()]


@pytest.mark.parametrize(("num_blocks", "eos", "is_recorded"), TOY)
def test_replacing_a_request_at_every_phase(
    num_blocks: int, eos: range, is_recorded: bool, toy_table: ToyTable, tmp_path: Path, drained: Drained
) -> None:
    with replayed_steps():
        llm = drained(
            save_toy(tmp_path, 50, eos_token_id=list(EOS)),
            plugins=[ToyPlugin(toy_table)],
            device="cpu",
            cuda_graphs=None if is_recorded else False,
            **sizes(4, num_blocks),
        )
    traffic = Traffic(llm, lambda prompt, tokens: toy_table.reference(prompt, len(tokens)), num_blocks, eos)
    assert check_replacing(traffic, is_recorded) == 0


@pytest.mark.parametrize(("num_blocks", "eos"), REAL)
def test_replacing_a_request_of_a_real_model(
    num_blocks: int, eos: range, tmp_path: Path, drained: Drained
) -> None:
    """What tests/gpu/test_gpu_in_flight.py runs on a GPU."""
    model = save_tiny("llama", tmp_path, eos_token_id=list(EOS))
    with replayed_steps():
        llm = drained(str(tmp_path), device="cpu", **sizes(16, num_blocks))
    traffic = Traffic(llm, partial(retraced_reference, model), num_blocks, eos)
    assert check_replacing(traffic, is_recorded=True) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_ended_is_computed_in_one_further_step_at_most(
    is_async: bool, toy_table: ToyTable, tmp_path: Path, drained: Drained
) -> None:
    prompts = ([7, 3, 11, last] for last in range(1, 50))
    prompt = next(p for p in prompts if 4 <= len(toy_table.greedy(p, 30, EOS)) < 12)
    llm = drained(
        save_toy(tmp_path, 50, eos_token_id=list(EOS)),
        plugins=[ToyPlugin(toy_table)],
        device="cpu",
        max_num_reqs=2,
        async_scheduling=is_async,
    )
    neighbour = [1, 2]
    want = [toy_table.greedy(prompt, 30, EOS), toy_table.greedy(neighbour, 40)]
    check_one_further_step(llm, [prompt, neighbour], want)
