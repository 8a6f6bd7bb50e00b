"""Steady decode: when the last step is repeated, when it is not, and what blocks that are handed out ahead may cost."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import Simulation, prompt


class Recorded(Simulation):
    """Keeps the outputs of steps that have rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.outputs = []
        execute = self.device.execute

        def recording(output):
            if output.num_reqs:
                self.outputs.append(output)
            return execute(output)

        self.device.execute = recording

    @property
    def repeats(self):
        return "".join("r" if output.is_repeat else "." for output in self.outputs)

    def fill(self, num, max_tokens=30, **params):
        rng = np.random.default_rng(num)
        for idx in range(num):
            self.add(f"r{idx}", prompt(rng, 5 + idx), max_tokens=max_tokens, ignore_eos=True, **params)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_decode_steps_are_repeated_up_to_the_last_token(depth):
    sim = Recorded(depth=depth)
    sim.fill(3)
    sim.run()
    sim.check_exact()
    # The prefill, the first decode step, and the step that brings the last tokens are planned.
    assert sim.repeats == ".." + "r" * 27 + "."


def test_whoever_comes_or_goes_has_the_next_step_planned():
    sim = Recorded(depth=1)
    sim.fill(3)
    for num_steps, change in (
        (6, lambda: sim.abort("r1")),
        (4, lambda: sim.add("new", [5, 6], max_tokens=9)),
    ):
        for _ in range(num_steps):
            sim.step()
        change()
    sim.run()
    sim.check_exact()
    assert sim.repeats.startswith("..rrrr" + ".rrr" + "..r")


def test_those_who_wait_for_a_slot_change_nothing():
    sim = Recorded(depth=1, seqs=3)
    sim.fill(3)
    for _ in range(5):
        sim.step()
    sim.add("waits", [5, 6])
    for _ in range(5):
        sim.step()
    assert sim.repeats == ".." + "r" * 8
    sim.run()
    sim.check_exact()


@pytest.mark.parametrize("depth", [0, 1])
def test_those_who_wait_for_blocks_change_nothing_until_there_are_some(depth):
    per_request = -(-(6 + 30 - 1) // 4)
    sim = Recorded(depth=depth, groups=((4, None),), num_blocks=(1 + 3 * per_request,), prefix=False)
    sim.fill(2)
    for _ in range(3):
        sim.step()
    before = len(sim.outputs)
    sim.add("waits", list(range(10, 110)), max_tokens=5, ignore_eos=True)
    for _ in range(12):
        sim.step()
    # It is looked at once, and not again as long as no more blocks are free.
    assert sim.repeats[before:] == "." + "r" * 11
    sim.abort("r0")
    sim.step()
    assert sim.repeats[-1] == "."
    sim.run()
    sim.check_exact()


def test_rows_that_are_looked_at_one_by_one_have_every_step_planned():
    sim = Recorded(depth=1)
    sim.fill(2)
    sim.add("looked at", [5, 6, 7], max_tokens=30, ignore_eos=True, stop_token_ids=[90])
    sim.run()
    sim.check_exact()
    # When it has ended the others may be in a steady state.
    assert "r" not in sim.repeats[: len(sim.emitted["looked at"])]


def test_steps_are_repeated_for_rows_with_log_probabilities():
    sim = Recorded(depth=1)
    sim.fill(2)
    sim.add("scored", [5, 6, 7], max_tokens=30, ignore_eos=True, logprobs=1)
    scored = sim.requests["scored"]
    sim.run()
    sim.check_exact()
    assert sim.repeats == ".." + "r" * 27 + "."
    assert [token.token_ids[0] for token in scored.logprobs] == scored.output_token_ids
    assert not sim.requests["r0"].logprobs


def test_one_step_in_64_tokens_hands_out_blocks_where_there_is_room():
    sim = Recorded(depth=1, num_blocks=(400,), groups=((4, None),))
    sim.fill(8, max_tokens=100)
    sim.run()
    sim.check_exact()
    with_blocks = [bool(len(output.block_updates[0].slots)) for output in sim.outputs]
    assert sum(with_blocks) <= 100 // 64 + 3
    assert sim.repeats.count("r") > 90


def test_large_blocks_are_handed_out_one_ahead():
    """Of states that stand for 64 tokens there are two a request, and few more for prefix hits."""
    sim = Recorded(depth=1, num_blocks=(600, 1 + 2 * 4 + 3), groups=((4, None), (64, 2)))
    sim.fill(4, max_tokens=300)
    sim.run()
    sim.check_exact()
    with_blocks = [bool(sum(len(update.slots) for update in output.block_updates)) for output in sim.outputs]
    assert sum(with_blocks) <= 20


@pytest.mark.parametrize("groups", [((4, None),), ((4, None), (4, 7))])
def test_blocks_ahead_push_nobody_out(groups):
    """The pools hold exactly what the requests need in the end."""
    per_request = -(-(12 + 20 - 1) // 4)
    sim = Recorded(depth=1, groups=groups, num_blocks=(1 + 3 * per_request,) * len(groups), prefix=False)
    rng = np.random.default_rng(5)
    for idx in range(3):
        sim.add(f"r{idx}", prompt(rng, 12), max_tokens=20, ignore_eos=True)
    sim.run()
    sim.check_exact()
    assert sim.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_that_nobody_waits_for_are_not_reported(depth):
    sim = Simulation(depth=depth)
    rng = np.random.default_rng(0)
    quiet = sim.add("quiet", prompt(rng, 5), max_tokens=20, logprobs=1, ignore_eos=True)
    stops = sim.add("stops", prompt(rng, 5), max_tokens=20)
    heard = sim.add("heard", prompt(rng, 7), max_tokens=20, ignore_eos=True)
    quiet.reports_tokens = stops.reports_tokens = False
    got = {"quiet": [], "stops": [], "heard": []}
    sim._take = lambda updates: [got[u.request.req_id].append(u) for u in updates]
    while sim.is_busy:
        sim.step()
    assert [len(got[name]) for name in ("quiet", "stops", "heard")] == [1, 1, 20]
    assert [u.finish_reason for u in got["heard"]] == [None] * 19 + ["length"]
    assert [t for u in got["heard"] for t in u.new_token_ids] == heard.output_token_ids
    assert (len(quiet.output_token_ids), len(quiet.logprobs)) == (20, 20)


@pytest.mark.parametrize("listens", [False, True])
def test_those_whom_the_model_refuses_change_nothing_until_it_lets_them_in(listens):
    asked, told = [], []

    def reserve(request):
        asked.append(request.req_id)
        return {"room": "there is none yet"} if request.req_id == "waits" and len(asked) < 14 else {}

    expect = (lambda requests: told.append([one.req_id for one in requests])) if listens else None
    sim = Recorded(depth=1, reserve=reserve, expect=expect)
    sim.fill(2)
    for _ in range(3):
        sim.step()
    before = len(sim.outputs)
    asked.clear(), told.clear()
    sim.add("waits", [5, 6], max_tokens=5, ignore_eos=True)
    for _ in range(15):
        sim.step()
    # It is planned for once, asked about in every step, and let in by the first that may.
    assert sim.repeats[before:] == "." + "r" * 12 + ".."
    assert asked == ["waits"] * 15  # the last time twice, and what is granted is granted again
    assert told[:1] == [["waits"]] * listens
    assert sim.scheduler.stats().waiting == 0
    sim.run()
    sim.check_exact()


def test_whoever_comes_while_another_is_refused_is_told_of():
    told = []
    sim = Recorded(
        depth=1,
        reserve=lambda request: {"room": "none"} if request.req_id == "first" and sim.num_steps < 14 else {},
        expect=lambda requests: told.append([one.req_id for one in requests]),
    )
    sim.fill(2)
    for _ in range(3):
        sim.step()
    for name in ("first", "second"):
        sim.add(name, [5, 6], max_tokens=5, ignore_eos=True)
        for _ in range(4):
            sim.step()
    assert told[-2:] == [["first"], ["first", "second"]]
    assert sim.repeats[-8:] == ".rrr.rrr"
    sim.run()
    sim.check_exact()
