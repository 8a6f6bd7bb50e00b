"""What the scheduler refuses, in which order it serves, and what one bad request may touch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from simulated_device import EOS, reference
from simulation import Simulation, prompt

from core_runner.errors import ConfigError, QueueFullError, RequestError
from core_runner.request import Request
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.scheduler import Scheduler, SchedulerConfig


def make(**config):
    settings = {"max_num_reqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, **config}
    return Scheduler(SchedulerConfig(**settings), [(16, None)], [9], eos_token_ids=[EOS])


def request(req_id="r", length=4, **params):
    return Request(req_id, np.arange(1, length + 1, dtype=np.int32), SamplingParams(**params))


# ---- admission


@pytest.mark.parametrize(
    ("config", "bad", "words"),
    [
        ({}, request(length=0), ["empty"]),
        ({}, request(length=64), ["64 tokens", "max_model_len=64"]),
        ({"vocab_size": 4}, request(length=4), ["id 4", "4 ids"]),
        ({"max_model_len": 512}, request(length=100, max_tokens=100), ["100 prompt", "13 blocks", "has 8"]),
        (
            {"max_num_batched_tokens": 16, "enable_chunked_prefill": False},
            request(length=9, max_tokens=9),
            ["9 prompt", "max_num_batched_tokens=16"],
        ),
    ],
)
def test_a_request_that_could_never_run_is_refused(config, bad, words):
    scheduler = make(**config)
    before = scheduler.stats()
    with pytest.raises(RequestError) as error:
        scheduler.add_request(bad)
    assert all(word in str(error.value) for word in ["'r'", *words])
    assert scheduler.stats() == before
    assert not scheduler.has_unfinished
    assert scheduler.schedule() is None


def test_one_id_and_one_object_are_added_once():
    scheduler = make()
    first = request()
    scheduler.add_request(first)
    with pytest.raises(RequestError, match="added before"):
        scheduler.add_request(request())
    scheduler.abort("r")
    with pytest.raises(RequestError, match="added before"):
        scheduler.add_request(first)
    scheduler.add_request(request())
    assert scheduler.unfinished_ids() == ["r"]


def test_queue_is_bounded():
    scheduler = make(max_waiting=2)
    for idx in range(2):
        scheduler.add_request(request(f"r{idx}"))
    with pytest.raises(QueueFullError, match="max_waiting=2"):
        scheduler.add_request(request("r2"))
    scheduler.abort("r0")
    scheduler.add_request(request("r2"))
    assert scheduler.stats().waiting == 2


@pytest.mark.parametrize(
    ("config", "max_tokens", "total"),
    [
        ({}, None, 64),
        ({}, 10, 14),
        ({}, 1000, 64),
        ({"max_model_len": 4096}, None, 129),  # what 8 blocks of 16 tokens hold, and one that is not computed
        ({"max_num_batched_tokens": 20, "enable_chunked_prefill": False}, None, 21),
    ],
)
def test_total_length(config, max_tokens, total):
    scheduler = make(**config)
    new = request(max_tokens=max_tokens)
    scheduler.add_request(new)
    assert new.max_total_len == total


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"max_num_reqs": 0}, "max_num_reqs=0"),
        ({"num_draft_tokens": -1}, "num_draft_tokens=-1"),
        ({"max_num_batched_tokens": 3, "num_draft_tokens": 3}, "max_num_batched_tokens=3"),
        ({"policy": "lifo"}, "'lifo'"),
    ],
)
def test_settings_that_cannot_work(config, word):
    with pytest.raises(ConfigError, match=word):
        make(**config)


# ---- order


def test_decode_goes_first_and_prefills_share_the_rest_of_the_budget():
    sim = Simulation(budget=20, seqs=3)
    rng = np.random.default_rng(0)
    sim.add("a", prompt(rng, 10), max_tokens=20, ignore_eos=True)
    sim.step()
    sim.add("b", prompt(rng, 30), max_tokens=2, ignore_eos=True)
    sim.add("c", prompt(rng, 30), max_tokens=2, ignore_eos=True)
    counts = []
    for _ in range(4):
        step = sim.scheduler.schedule()
        counts.append(
            {r.req_id: int(n) for r, n in zip(step.requests, step.output.num_scheduled_tokens, strict=True)}
        )
        sim._take(sim.scheduler.update(step, sim.device.execute(step.output)))
    assert counts == [
        {"a": 1, "b": 19},
        {"a": 1, "b": 11, "c": 8},
        {"a": 1, "b": 1, "c": 18},
        {"a": 1, "c": 4},
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_admission_order(policy):
    sim = Simulation(seqs=1, policy=policy)
    rng = np.random.default_rng(0)
    order = []
    for req_id, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 0)):
        sim.add(req_id, prompt(rng, 5), priority=priority)
    while sim.is_busy:
        sim.step()
        order += [req_id for req_id in sim.finished if req_id not in order]
    assert order == (["a", "b", "c", "d"] if policy == "fcfs" else ["d", "b", "c", "a"])


def test_the_last_in_rank_gives_way():
    """Under "priority" that is the largest number, also when it came first."""
    sim = Simulation(num_blocks=(7,), seqs=3, length=64, policy="priority", prefix=False)
    rng = np.random.default_rng(0)
    for req_id, priority in (("low", 5), ("mid", 1), ("high", 0)):
        sim.add(req_id, prompt(rng, 20), priority=priority, max_tokens=30, ignore_eos=True)
    sim.run()
    sim.check_exact()
    preemptions = {req_id: r.num_preemptions for req_id, r in sim.requests.items()}
    assert preemptions["low"] > 0
    assert preemptions["high"] == 0
    assert list(sim.finished) == ["high", "mid", "low"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_no_starvation_under_pressure(depth, num_draft_tokens):
    """Fewer tokens than rows, blocks for hardly more than one, a stream of newcomers: the first still ends."""
    sim = Simulation(
        groups=((4, None),),
        num_blocks=(13,),
        seqs=6,
        budget=3,
        length=48,
        depth=depth,
        num_draft_tokens=num_draft_tokens,
        prefix=False,
    )
    rng = np.random.default_rng(4)
    sim.add("first", prompt(rng, 12), max_tokens=36, ignore_eos=True)
    num_added = 0
    while "first" not in sim.finished:
        if sim.scheduler.stats().waiting < 3:
            sim.add(f"late{num_added}", prompt(rng, 20), max_tokens=20, ignore_eos=True)
            num_added += 1
        sim.step()
        assert sim.num_steps < 400
    sim.run()
    sim.check_exact()


def test_a_prefill_that_cannot_be_chunked_waits_for_room():
    sim = Simulation(budget=48, length=48, enable_chunked_prefill=False)
    rng = np.random.default_rng(5)
    sim.add("a", prompt(rng, 10), max_tokens=5, ignore_eos=True)
    sim.step()
    sim.add("b", prompt(rng, 47), max_tokens=1)
    sim.add("c", prompt(rng, 47), max_tokens=1)
    while sim.is_busy:
        sim.step()
        for row in sim.device.rows.values():
            assert row.num_computed >= row.new.prefill_len, "a prefill was cut"
    sim.check_exact()


# ---- one bad request


@pytest.mark.parametrize("depth", [0, 1])
def test_failed_row_ends_alone_and_its_blocks_are_never_hit(depth):
    sim = Simulation(depth=depth)
    rng = np.random.default_rng(6)
    ids = prompt(rng, 40)
    sim.device.fail_ids.add("bad")
    bad, good = sim.add("bad", ids), sim.add("good", prompt(rng, 40), logprobs=1)
    sim.run()
    assert (sim.finished["bad"], bad.finish_reason, bad.output_token_ids) == ("error", "error", [])
    assert (good.output_token_ids, sim.finished["good"]) == reference(good.prompt_token_ids, "", 48)
    after = sim.add("after", ids)
    sim.run()
    assert after.num_cached_tokens == 0


def test_failed_row_of_a_preempted_request_ends_it_in_the_queue():
    sim = Simulation(depth=1)
    sim.device.fail_ids.add("bad")
    bad = sim.add("bad", prompt(np.random.default_rng(7), 40))
    sim.step()
    sim.scheduler._preempt(bad)
    sim.run()
    assert bad.finish_reason == "error"


def test_requests_with_model_inputs_share_no_blocks():
    """The same tokens mean something else beside other audio."""
    sim = Simulation()
    ids = prompt(np.random.default_rng(8), 40)
    for idx in range(2):
        new = Request(f"r{idx}", ids, SamplingParams(max_tokens=4), model_inputs={"audio": idx})
        sim.scheduler.add_request(new)
        sim.requests[new.req_id], sim.emitted[new.req_id], sim.num_logprobs[new.req_id] = new, [], 0
        sim.run()
        assert new.num_cached_tokens == 0
    assert sim.add("plain", ids).req_id == "plain"
    sim.run()
    assert sim.requests["plain"].num_cached_tokens == 0


def test_requests_whose_model_inputs_have_names_share_blocks_by_them():
    sim = Simulation()
    ids = prompt(np.random.default_rng(8), 40)
    hits = []
    for keys in (
        {"audio": b"x"},
        {"audio": b"y"},
        {"audio": b"x"},
        {"image": b"x"},
        {"audio": b"x", "image": b"x"},
    ):
        name = f"r{len(hits)}"
        new = Request(name, ids, SamplingParams(max_tokens=4), model_inputs={"audio": 0}, input_keys=keys)
        sim.scheduler.add_request(new)
        sim.requests[name], sim.emitted[name], sim.num_logprobs[name] = new, [], 0
        sim.run()
        hits.append(new.num_cached_tokens)
    assert hits[2] > 0
    assert [hit for index, hit in enumerate(hits) if index != 2] == [0, 0, 0, 0]
    sim.add("plain", ids)
    sim.run()
    assert sim.requests["plain"].num_cached_tokens == 0


def test_salt_keeps_prefixes_apart():
    sim = Simulation()
    ids = prompt(np.random.default_rng(9), 40)
    hits = []
    for idx, salt in enumerate(["", "x", "", "x"]):
        new = sim.add(f"r{idx}", ids, cache_salt=salt)
        sim.run()
        hits.append(new.num_cached_tokens)
    sim.check_exact()
    assert hits == [0, 0, 32, 32]


# ---- the engine's side


def test_abort_and_finish_of_an_unknown_request():
    scheduler = make()
    assert not scheduler.abort("nobody")
    assert not scheduler.finish("nobody")


def test_removals_are_reported_once_when_the_engine_goes_idle():
    sim = Simulation(depth=1)
    sim.add("a", prompt(np.random.default_rng(10), 5), max_tokens=50, ignore_eos=True)
    sim.step()
    sim.abort("a")
    while sim.is_busy:
        sim.step()
    assert sim.device.rows
    output = sim.scheduler.flush()
    assert [removed.reason for removed in output.removed] == ["aborted"]
    assert output.num_reqs == output.total_num_tokens == 0
    sim.device.execute(output)
    sim.check_drained()


def test_a_step_that_samples_nothing_need_not_come_back():
    sim = Simulation(budget=16)
    sim.add("a", prompt(np.random.default_rng(11), 40))
    for _ in range(2):
        step = sim.scheduler.schedule()
        assert not step.samples.any()
        sim.device.execute(step.output)
    sim.run()
    sim.check_exact()


def test_seed_is_drawn_once_and_kept_through_preemption():
    sim = Simulation()
    rng = np.random.default_rng(12)
    sim.add("a", prompt(rng, 5), ignore_eos=True)
    sim.add("b", prompt(rng, 5), seed=-1, ignore_eos=True)
    sim.step()
    seeds = {row.new.req_id: row.new.seed for row in sim.device.rows.values()}
    assert seeds["b"] == 2**63 - 1
    for req_id in ("a", "b"):
        sim.scheduler._preempt(sim.requests[req_id])
    sim.step()
    assert {row.new.req_id: row.new.seed for row in sim.device.rows.values()} == seeds
    assert [row.new.prompt_len for row in sim.device.rows.values()] == [5, 5]
    assert [row.new.prefill_len for row in sim.device.rows.values()] == [6, 6]
    sim.run()


def test_scheduling_imports_no_torch():
    code = "import sys; import core_runner.scheduling.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_who_gave_way_returns_only_when_the_others_have_their_next_block():
    """Else it would be computed again, and thrown out again, every few steps."""
    sim = Simulation(groups=((4, None),), num_blocks=(21,), seqs=5, length=48, prefix=False)
    rng = np.random.default_rng(13)
    for idx in range(30):
        length, max_tokens = rng.integers(1, 12), int(rng.integers(5, 36))
        sim.add(f"r{idx}", prompt(rng, length), max_tokens=max_tokens, ignore_eos=True)
    resumed = 0
    while sim.is_busy:
        before = sim.scheduler.stats()
        step = sim.scheduler.schedule()
        for new in step.output.new_requests:
            if new.prefill_len > new.prompt_len:
                resumed += 1
                needed = -(-new.prefill_len // 4)
                assert before.free_blocks[0] >= needed + before.running
        sim._take(sim.scheduler.update(step, sim.device.execute(step.output)))
    sim.run()
    sim.check_exact()
    assert resumed > 0
