"""Random workloads against the simulated device: every stream EXACT, every pool DRAINED."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import Simulation, prompt

LAYOUTS = {
    "full": (((16, None),), (24,)),
    "small blocks": (((2, None),), (60,)),
    "full and window": (((4, None), (4, 7)), (40, 30)),
    "windows, two block sizes": (((4, 9), (8, 16)), (24, 16)),
    "full and window, two block sizes": (((16, None), (4, 5)), (14, 40)),
    "no cache groups": ((), ()),
}


def random_workload(sim, rng, num_requests, length, *, aborts=True, plain=False):
    """A callback that adds and aborts at random micro-phases, with shared prefixes, salts and priorities.

    plain: nobody has options for which update() looks at every token.
    """
    shared = [prompt(rng, length) for _ in range(2)]
    left = list(range(num_requests))

    def act(phase):
        if left and rng.random() < 0.25:
            common = shared[rng.integers(2)][: rng.integers(0, length // 2)]
            ids = (common + prompt(rng, 1 + rng.integers(length // 3)))[: length - 2]
            sim.add(
                f"r{left.pop()}",
                ids,
                max_tokens=int(rng.integers(1, length // 2)),
                ignore_eos=bool(rng.random() < 0.5),
                stop_token_ids=[5] if rng.random() < 0.2 and not plain else [],
                logprobs=1 if rng.random() < 0.3 and not plain else None,
                cache_salt=str(rng.integers(2)),
                priority=int(rng.integers(3)),
            )
        if aborts and sim.requests and rng.random() < 0.03:
            sim.abort(rng.choice(list(sim.requests)))

    return act, left


def run_random(layout, num_draft_tokens, prefix, depth, policy, seed):
    groups, num_blocks = LAYOUTS[layout]
    rng = np.random.default_rng([seed, depth, num_draft_tokens])
    sim = Simulation(
        groups=groups,
        num_blocks=num_blocks,
        seqs=5,
        budget=int(rng.choice([1 + num_draft_tokens, 7, 23, 64])),
        length=48,
        depth=depth,
        prefix=prefix,
        policy=policy,
        num_draft_tokens=num_draft_tokens,
        seed=seed,
    )
    act, left = random_workload(sim, rng, 14, 48)
    while left:
        sim.step(act) if sim.is_busy else act("idle")
    sim.run(act)
    sim.check_exact()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("depth", "policy"), [(0, "fcfs"), (1, "fcfs"), (1, "priority"), (2, "priority")])
def test_random_workload_is_exact_and_drained(layout, num_draft_tokens, prefix, depth, policy):
    seed = list(LAYOUTS).index(layout)
    run_random(layout, num_draft_tokens, prefix, depth, policy, seed)


@pytest.mark.parametrize("depth", [0, 1])
def test_tiny_pool_preempts_and_reuses(depth):
    """The random layouts do force what they are meant to force."""
    sim = Simulation(groups=((4, None),), num_blocks=(14,), seqs=6, budget=16, length=48, depth=depth)
    rng = np.random.default_rng(3)
    act, left = random_workload(sim, rng, 40, 48, aborts=False)
    while left:
        sim.step(act) if sim.is_busy else act("idle")
    sim.run()
    sim.check_exact()
    stats = sim.scheduler.stats()
    assert stats.preemptions > 5
    assert 0 < stats.cached_tokens < stats.queried_tokens
    assert sim.device.removed_reasons.count("preempted") == stats.preemptions
    assert sim.device.removed_reasons.count("finished") == 40
    assert stats.generated_tokens == sum(len(tokens) for tokens in sim.emitted.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_steady_steps_among_arrivals_aborts_and_preemptions(layout, depth):
    groups, num_blocks = LAYOUTS[layout]
    rng = np.random.default_rng([depth, len(groups), *num_blocks])
    sim = Simulation(groups=groups, num_blocks=num_blocks, seqs=4, budget=64, length=64, depth=depth)
    execute, repeats = sim.device.execute, []

    def counting(output):
        repeats.append(output.is_repeat)
        return execute(output)

    sim.device.execute = counting
    act, left = random_workload(sim, rng, 20, 64, plain=True)

    def act_now_and_then(phase):
        if rng.random() < 0.2:
            act(phase)

    while left:
        sim.step(act_now_and_then) if sim.is_busy else act("idle")
    sim.run(act_now_and_then)
    sim.check_exact()
    assert sum(repeats) > len(repeats) // 8
