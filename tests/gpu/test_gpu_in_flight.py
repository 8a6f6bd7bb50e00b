"""Slots and blocks that are given up and taken again while a GPU still has the step to do (field report B-03)."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from support.drained import Drained
from support.load import assert_near_tie, quiet
from support.reference import greedy_reference
from support.tiny_models import save_tiny
from support.tiny_recurrent import retraced_reference
from support.traffic import CASES, EOS, Traffic, check_one_further_step, check_replacing, sizes
from support.whole_steps import ways_since

from core_runner import SamplingParams

pytestmark = pytest.mark.gpu
# Poisoning waits for the device, and a block that is poisoned late would hide that it was written late.
OPTIONS = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "poison": False}
# By whether steps are replayed; 1.5 ms and 7.5 ms, several times what the host takes to launch a step.
LAG_CYCLES = {True: 3_000_000, False: 15_000_000}
# Eager steps differ in nothing but their launches.
LAGGING = [pytest.param(*case, True, id=name) for name, case in CASES.items()]
LAGGING += [pytest.param(*CASES["eos"], False, id="eos, eager")]


class LaggingTraffic(Traffic):
    """The device begins each step late: whatever happens between steps happens before the step has run."""

    num_behind = lag_cycles = 0

    def on_phase(self, phase: str) -> None:
        if phase == "after schedule":
            torch.cuda._sleep(self.lag_cycles)
        elif phase == "after sample_tokens":
            self.launched = torch.cuda.Event()
            self.launched.record()
        super().on_phase(phase)
        if phase == "after update":
            self.num_behind += not self.launched.query()


@pytest.mark.parametrize(("num_blocks", "eos", "is_recorded"), LAGGING)
def test_replacing_a_request_at_every_phase(
    num_blocks: int, eos: range, is_recorded: bool, tmp_path: Path, drained: Drained
) -> None:
    model = save_tiny("llama", tmp_path, eos_token_id=list(EOS)).to("cuda")
    options = {**OPTIONS, "cuda_graphs": None if is_recorded else False}
    llm = drained(str(tmp_path), **options, **sizes(16, num_blocks))
    traffic = LaggingTraffic(llm, partial(retraced_reference, model), num_blocks, eos)
    traffic.lag_cycles, before = LAG_CYCLES[is_recorded], llm.stats().steps
    # One request in hundreds may meet a near-tie, and its rest is not compared.
    assert check_replacing(traffic, is_recorded) <= 2 * traffic.block_size
    assert traffic.num_behind > (llm.stats().steps - before) // 2, "the device was not behind"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_ended_is_computed_in_one_further_step_at_most(
    is_async: bool, tmp_path: Path, drained: Drained
) -> None:
    model = save_tiny("llama", tmp_path, eos_token_id=list(EOS)).to("cuda")
    candidates = ([7, 3, 11, last] for last in range(3, 200))
    ends = (
        (prompt, greedy_reference(model, prompt, 12, ignore_eos=False).token_ids) for prompt in candidates
    )
    prompt, ending = next((prompt, tokens) for prompt, tokens in ends if 4 <= len(tokens) < 12)
    neighbour = [7, 3]
    want = greedy_reference(model, neighbour, 40).token_ids
    options = {**OPTIONS, "block_size": 16, "max_num_reqs": 2, "num_blocks": 33}
    llm = drained(str(tmp_path), async_scheduling=is_async, **options)
    check_one_further_step(llm, [prompt, neighbour], [ending, want])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_requests_that_push_each_other_out_are_those_of_a_roomy_engine(
    prefix: bool, is_async: bool, tmp_path: Path, drained: Drained
) -> None:
    save_tiny("qwen3", tmp_path)
    draw = random.Random(11)
    work = [
        (
            [draw.randrange(3, 211) for _ in range(draw.randrange(1, 60))],
            SamplingParams(temperature=0.9 * (index % 2), seed=index, max_tokens=30, ignore_eos=True),
        )
        for index in range(16)
    ]
    options = {**OPTIONS, "block_size": 16, "max_num_reqs": 4, "enable_prefix_caching": prefix}
    roomy = drained(str(tmp_path), num_blocks=64, async_scheduling=is_async, **options)
    tight = drained(str(tmp_path), num_blocks=11, async_scheduling=is_async, **options)
    want, before = quiet(roomy, work), tight.stats().step_ways
    for _ in range(2):  # the second time, more steps are replays
        for number, tokens in enumerate(quiet(tight, work)):
            if tokens != want[number]:
                assert_near_tie(roomy, work, want, number, tokens)
    assert tight.stats().preemptions > 10
    assert roomy.stats().preemptions == 0
    assert ways_since(tight, before)["step graph"] > 100
