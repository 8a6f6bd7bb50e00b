"""Field reports B-01, B-02 and B-03 at the level of the scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_device import reference
from simulation import Simulation, prompt

BLOCK_SIZE = 16


def run_one(sim, req_id, ids, **params):
    request = sim.add(req_id, ids, **params)
    sim.run()
    sim.check_exact()
    return request


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
@pytest.mark.parametrize("window", [None, 20])
def test_b01_whole_prompt_cached(length, depth, window):
    sim = Simulation(groups=((BLOCK_SIZE, None), (BLOCK_SIZE, window)), num_blocks=(64, 64), depth=depth)
    ids = prompt(np.random.default_rng(length), length)
    hits = [run_one(sim, f"r{i}", ids, logprobs=1).num_cached_tokens for i in range(3)]
    assert hits == [0, (length - 1) // BLOCK_SIZE * BLOCK_SIZE, (length - 1) // BLOCK_SIZE * BLOCK_SIZE]


@pytest.mark.parametrize("depth", [0, 1])
def test_b01_prefixes_of_a_longer_prompt(depth):
    sim = Simulation(depth=depth)
    rng = np.random.default_rng(1)
    ids = prompt(rng, 48)
    run_one(sim, "a", ids)
    b = sim.add("b", ids[:32])
    sim.add("uncached", prompt(rng, 40))
    sim.run()
    c = run_one(sim, "c", [*ids[:32], 7])
    assert (b.num_cached_tokens, c.num_cached_tokens) == (16, 32)
    again = run_one(sim, "a2", ids)
    assert again.num_cached_tokens == 32


def test_b01_hit_reaches_into_the_output_of_an_earlier_turn():
    sim = Simulation(depth=1)
    ids = prompt(np.random.default_rng(2), 30)
    first = run_one(sim, "turn 1", ids, max_tokens=40, ignore_eos=True)
    # The last token of the 70 was never computed; 64 of the 69 others fill blocks.
    second = run_one(sim, "turn 2", [*ids, *first.output_token_ids, 3, 4, 5])
    assert second.num_cached_tokens == 64


def test_a_later_step_hits_blocks_of_a_prefill_that_still_runs():
    sim = Simulation(budget=32, depth=1)
    ids = prompt(np.random.default_rng(3), 100)
    sim.add("a", ids)
    sim.step()
    b = sim.add("b", ids)
    sim.run()
    sim.check_exact()
    assert b.num_cached_tokens == 96


@pytest.mark.parametrize("total", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_b02_preempted_at_a_block_edge(total, prefix, depth):
    """The last of four requests gives way exactly when prompt and output reach `total` tokens."""
    sim = Simulation(num_blocks=(13,), seqs=4, length=64, prefix=prefix, depth=depth)
    rng = np.random.default_rng(total)
    for idx in range(4):
        sim.add(f"r{idx}", prompt(rng, 10), max_tokens=38, ignore_eos=True, logprobs=1)
    victim = sim.requests["r3"]
    preempt = sim.scheduler._preempt
    while victim.num_tokens + int(sim.scheduler._slots.num_in_flight_np[victim.slot]) < total:
        sim.step()
    preempt(victim)
    sim.scheduler.check_integrity()
    assert victim.num_tokens + victim.num_in_flight == total
    sim.run()
    sim.check_exact()
    assert victim.num_preemptions >= 1
    assert len(victim.logprobs) == len(victim.output_token_ids) == 38


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prompt_len", [14, 15, 16, 17, 30, 31, 32, 33])
def test_b02_pool_too_small_for_four(prompt_len, prefix, depth):
    num_blocks = 1 + 4 * (-(-prompt_len // BLOCK_SIZE)) + 2
    sim = Simulation(num_blocks=(num_blocks,), seqs=4, length=80, prefix=prefix, depth=depth)
    rng = np.random.default_rng(prompt_len)
    for idx in range(4):
        sim.add(f"r{idx}", prompt(rng, prompt_len), max_tokens=30, ignore_eos=True, logprobs=1)
    sim.run()
    sim.check_exact()
    stats = sim.scheduler.stats()
    assert stats.preemptions > 0
    assert sim.requests["r0"].num_preemptions == 0, "the first to come gave way"
    if not prefix:
        assert stats.cached_tokens == 0


PHASES = ("before schedule", "scheduled", "launched")


@pytest.mark.parametrize(("kind", "num_trials"), [("abort", 200), ("finish", 60), ("preempt", 120)])
def test_b03_slot_and_blocks_change_hands_while_a_step_is_in_flight(kind, num_trials):
    """End one of four decoding requests and add one that needs its slot and its blocks."""
    for trial in range(num_trials):
        rng = np.random.default_rng(trial)
        sim = Simulation(num_blocks=(13,), seqs=4, length=64, depth=1, prefix=trial % 2 == 0)
        for idx in range(4):
            sim.add(f"r{idx}", prompt(rng, 20), max_tokens=24, ignore_eos=bool(idx % 2))
        at_step, at_phase = int(rng.integers(1, 14)), PHASES[trial % 3]

        def act(phase, sim=sim, rng=rng, at_step=at_step, at_phase=at_phase):
            if phase != at_phase or sim.num_steps < at_step or "new" in sim.requests:
                return
            _end_one(sim, f"r{rng.integers(4)}", kind)
            sim.add("new", prompt(rng, 20), max_tokens=20)

        sim.run(act)
        sim.check_exact()
        assert "new" in sim.finished


def _end_one(sim, req_id, kind):
    request = sim.requests[req_id]
    if kind == "abort":
        sim.abort(req_id)
        assert not sim.scheduler.abort(req_id)
    elif kind == "finish" and sim.scheduler.finish(req_id):
        assert request.finish_reason == "stop"
        sim.ended_by_caller.add(req_id)
    elif kind == "preempt" and request.slot >= 0:
        sim.scheduler._preempt(request)


def test_b03_end_id_arrives_after_the_next_step_was_launched():
    """The step that was scheduled too much is dropped, also when its request was preempted meanwhile."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        ids = prompt(rng, 12)
        tokens, reason = reference(ids, "", 64)
        if reason == "length":
            continue
        sim = Simulation(num_blocks=(13,), seqs=2, length=64, depth=1)
        request = sim.add("r", ids, max_tokens=52)
        while len(request.output_token_ids) < len(tokens) - 1:
            sim.step()
        if seed % 2 and request.slot >= 0:
            sim.scheduler._preempt(request)
        sim.run()
        sim.check_exact()
        assert request.output_token_ids == tokens


def test_a_block_is_not_hit_before_the_step_that_fills_it():
    """Its 16 tokens are known, but the state of the last one is written by the very step that admits `b`."""
    sim = Simulation(depth=0)
    a = sim.add("a", prompt(np.random.default_rng(4), 14), max_tokens=20, ignore_eos=True)
    while a.num_tokens < 16:
        sim.step()
    known = a.token_ids().tolist()
    b = sim.add("b", [*known, 1, 2])
    sim.step()
    c = sim.add("c", [*known, 3, 4])
    sim.run()
    sim.check_exact()
    assert (b.num_cached_tokens, c.num_cached_tokens) == (0, 16)
