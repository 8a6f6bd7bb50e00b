"""The workloads are the ones that were agreed on: same ids each time, drawn in the agreed order."""

from __future__ import annotations

import random

from common import MODELS
from workloads import WORKLOADS

VOCAB = MODELS["qwen3-0.6b"]["vocab_size"]


def test_mixed_lengths_are_drawn_before_the_ids_of_each_request() -> None:
    draw = random.Random(1234)
    for job in WORKLOADS["W3"].jobs(VOCAB)[:50]:
        prompt_len, num_output = draw.randint(32, 512), draw.randint(64, 256)
        assert job.prompt == [draw.randrange(100, VOCAB - 1000) for _ in range(prompt_len)]
        assert job.num_output == num_output


def test_fixed_lengths_draw_ids_alone() -> None:
    draw = random.Random(1234)
    jobs = WORKLOADS["W1"].jobs(VOCAB)
    assert jobs[0].prompt == [draw.randrange(100, VOCAB - 1000) for _ in range(128)]
    assert jobs[1].prompt[0] == draw.randrange(100, VOCAB - 1000)
    assert {(len(job.prompt), job.num_output) for job in jobs} == {(128, 256)}
    assert [job.prompt for job in WORKLOADS["W4"].jobs(VOCAB)] == [job.prompt for job in jobs]


def test_sizes() -> None:
    sums = {
        name: (len(jobs), sum(len(job.prompt) for job in jobs), sum(job.num_output for job in jobs))
        for name, jobs in ((name, work.jobs(VOCAB)) for name, work in WORKLOADS.items())
    }
    assert sums["W1"] == (256, 32768, 65536)
    assert sums["W2"] == (1, 128, 512)
    assert sums["W4"] == (256, 32768, 256)
    assert sums["W3"][0] == 1024
