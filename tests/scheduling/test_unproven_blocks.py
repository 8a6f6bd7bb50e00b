"""Blocks that no sample has shown to be finite yet: who is offered them, and until when (field report C-03)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from simulation import Simulation, prompt
from support.drained import Drained
from support.tiny_recurrent import save_tiny

from core_runner import SamplingParams
from core_runner.request import Request
from model_states.components import RecurrentState

PROMPT = prompt(np.random.default_rng(21), 100)


def hit_of_another(sim: Simulation, tokens: list[int] = PROMPT) -> int:
    other = sim.add(f"other{len(sim.requests)}", [*tokens, 1])
    sim.run()
    return other.num_cached_tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("groups", [((16, None),), ((16, None), (32, 24))])
def test_an_abort_in_the_middle_of_the_prompt_leaves_nothing_to_hit(depth: int, groups) -> None:
    sim = Simulation(budget=32, depth=depth, groups=groups, num_blocks=(64,) * len(groups))
    sim.add("a", PROMPT)
    sim.step()
    sim.step()
    assert any(sim.scheduler.stats().cached_blocks), "a step that is launched offers its blocks"
    sim.abort("a")
    assert not any(sim.scheduler.stats().cached_blocks)
    assert hit_of_another(sim) == 0
    sim.check_exact()


def test_an_abort_before_the_first_token_is_known_leaves_nothing_to_hit() -> None:
    sim = Simulation(depth=1)
    sim.add("a", PROMPT)
    sim.step()  # all of the prompt is launched, and its sample is on the way
    sim.abort("a")
    assert hit_of_another(sim) == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_after_the_first_token_leaves_the_prompt(depth: int) -> None:
    sim = Simulation(depth=depth)
    a = sim.add("a", PROMPT)
    while not a.output_token_ids:
        sim.step()
    sim.abort("a")
    assert hit_of_another(sim) == 96


def test_what_an_aborted_request_was_given_by_a_hit_stays() -> None:
    sim = Simulation(budget=32)
    assert hit_of_another(sim, PROMPT[:64]) == 0
    a = sim.add("a", PROMPT)
    sim.step()
    assert a.num_cached_tokens == 64
    sim.abort("a")
    assert hit_of_another(sim) == 64


def test_one_that_is_aborted_before_it_ran_takes_nothing_from_others() -> None:
    sim = Simulation(seqs=1)
    sim.add("first", PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        sim.step()
    sim.add("waits", PROMPT)
    sim.step()
    sim.abort("waits")
    sim.run()
    assert hit_of_another(sim) == 96


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_request_hits_what_it_computed_and_takes_it_back_when_it_is_aborted(depth: int) -> None:
    for is_aborted in (False, True):
        sim = Simulation(budget=32, depth=depth)
        a = sim.add("a", PROMPT)
        sim.step()
        sim.step()
        sim.scheduler._preempt(a)
        assert any(sim.scheduler.stats().cached_blocks)
        if is_aborted:
            sim.abort("a")
        else:
            before = sim.scheduler.stats().cached_tokens
            sim.step()
            assert sim.scheduler.stats().cached_tokens - before == 64
            sim.run()
        assert hit_of_another(sim) == (0 if is_aborted else 96)
        sim.check_exact()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_two_that_are_aborted_leave_nothing_to_hit_whoever_is_first(order: str) -> None:
    sim = Simulation(budget=48, depth=1)
    a = sim.add("a", PROMPT)
    sim.step()
    b = sim.add("b", [*PROMPT[:32], *PROMPT])
    while b.num_cached_tokens < 0:
        sim.step()
    assert (b.num_cached_tokens, a.output_token_ids) == (32, [])
    for req_id in order:
        sim.abort(req_id)
    assert not any(sim.scheduler.stats().cached_blocks)
    assert hit_of_another(sim, PROMPT[:64]) == 0


def test_the_last_known_token_fills_no_block_that_is_offered() -> None:
    """Its numbers are computed by a step whose sample is not known."""
    sim = Simulation(depth=1)
    a = sim.add("a", PROMPT[:10], max_tokens=40, ignore_eos=True)
    while a.num_tokens < 16:
        sim.step()
    sim.abort("a")
    assert hit_of_another(sim, a.token_ids().tolist()) == 0
    known = a.token_ids().tolist()
    again = sim.add("again", PROMPT[:10], max_tokens=40, ignore_eos=True)
    while again.num_tokens < 17:
        sim.step()
    sim.abort("again")
    assert hit_of_another(sim, [*known, 2]) == 16


def test_state_that_is_not_finite_ends_no_later_request(drained: Drained, tmp_path: Path) -> None:
    save_tiny("mamba2", tmp_path)
    options = {"device": "cpu", "max_model_len": 128, "max_num_reqs": 3, "num_blocks": 30, "block_size": 16}
    llm = drained(
        str(tmp_path),
        max_num_batched_tokens=16,
        model_options={"state_block_size": 16},
        poison=False,
        **options,
    )
    tokens = [(7 * i) % 200 + 3 for i in range(80)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.engine.add_request(Request("a", tokens, params))
    for _ in range(2):
        llm.engine.step()
    for component in llm.engine.runner.model_state.components:
        if isinstance(component, RecurrentState):
            for layer in component.layers:
                for state in layer.tensors.values():
                    state[1:] = torch.nan
    llm.engine.step()
    llm.engine.abort("a")
    llm.engine.settle()
    (output,) = llm.generate([*tokens[:70], 9, 9, 9], params)
    assert (output.num_cached_tokens, output.outputs[0].finish_reason) == (0, "length")
