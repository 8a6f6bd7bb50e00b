"""Which steps share a graph, when one is recorded, and what happens where none can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.replays import HostRecorder

from core_runner.graphs import StepGraphs, StepShape
from core_runner.scheduling.output import SchedulerOutput


def make(max_num_reqs: int = 256, max_num_tokens: int = 8192, recorder=None) -> StepGraphs:
    return StepGraphs(max_num_reqs, max_num_tokens, recorder or HostRecorder(torch.device("cpu")))


def step(*counts: int) -> SchedulerOutput:
    tokens = np.array(counts, np.int32)
    return SchedulerOutput([], [], [], np.arange(len(counts), dtype=np.int32), tokens, np.zeros_like(tokens))


@pytest.mark.parametrize(("max_num_reqs", "max_num_tokens"), [(1, 7), (6, 64), (100, 300), (256, 8192)])
def test_every_step_fits_its_shape(max_num_reqs: int, max_num_tokens: int) -> None:
    graphs = make(max_num_reqs, max_num_tokens)
    for num_reqs in range(1, max_num_reqs + 1):
        for extra in (0, 1, 5, 50, 500, 1700):
            counts = [1 + extra] + [1] * (num_reqs - 1)
            if sum(counts) > max_num_tokens:
                continue
            shape = graphs.shape(step(*counts))
            assert shape is not None
            assert sum(counts) <= shape.num_tokens <= max_num_tokens
            assert num_reqs <= shape.num_reqs <= max_num_reqs
            assert 1 + extra <= shape.max_query_len
            assert (shape.max_query_len == 1) == (extra == 0)


@pytest.mark.parametrize(
    ("counts", "longest"),
    [
        ([128] * 64, 256),
        ([256] * 16, 256),
        ([257, 3000], 3328),
        ([512] * 16, 2048),
        ([2048, 1000], 2048),
        ([2049, 1], 2176),
        ([128] * 16, 2048),  # no large step
        ([8192], 8192),
    ],
)
def test_large_steps_of_short_prompts_say_so(counts: list[int], longest: int) -> None:
    shape = make().shape(step(*counts))
    assert shape is not None
    assert shape.max_query_len == longest


def test_full_shapes_are_those_of_full_steps() -> None:
    graphs = make()
    full = {graphs.shape(step(*counts)) for counts in ([32] * 256, [512] * 16 + [1] * 240, [8192])}
    same_rows = {StepShape(shape.num_tokens, 256, shape.max_query_len) for shape in full if shape is not None}
    assert same_rows | {StepShape(256, 256, 256)} == set(graphs.full_shapes())
    assert make(4, 64).full_shapes() == [StepShape(4, 4, 4), StepShape(64, 4, 64)]


def test_padding_is_bounded() -> None:
    graphs = make()
    for num_tokens in range(129, 8193):
        shape = graphs.shape(step(num_tokens))
        assert shape is not None
        assert shape.num_tokens - num_tokens < num_tokens / (8 if num_tokens <= 2048 else 16)


def test_without_a_recorder_steps_run_eagerly_and_say_so() -> None:
    graphs = StepGraphs(4, 64, None)
    assert graphs.shape(step(1)) is None
    assert graphs.counts == {"eager: no graphs": 1}
    assert not graphs.enabled


class Count:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


@pytest.mark.parametrize(("shape", "num_eager"), [(StepShape(4, 4, 1), 1), (StepShape(16, 4, 16), 2)])
def test_decode_is_recorded_at_once_and_a_prefill_shape_when_it_recurs(
    shape: StepShape, num_eager: int
) -> None:
    graphs, body = make(), Count()
    for call in range(1, 6):
        assert graphs.run("step", shape, "plain", body) == call
        assert [g.num_replays for g in graphs.graphs] == ([call - num_eager] if call >= num_eager else [])
    graphs.run("step", shape, "filtered", body)
    graphs.run("forward", shape, "plain", body)
    assert graphs.counts["step graph"] == 5 - num_eager
    assert "plain" in graphs.report()


def test_a_step_that_cannot_be_recorded_is_served_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(HostRecorder):
        def record(self, body):
            raise RuntimeError("an operation that no graph can hold\nand its details")

    graphs, body = make(recorder=Refusing(torch.device("cpu"))), Count()
    shape = graphs.shape(step(1))
    assert shape is not None
    assert graphs.run("step", shape, "plain", body) == 1
    assert not graphs.enabled
    assert graphs.shape(step(1)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "a step cannot be recorded as a CUDA graph (an operation that no graph can hold); steps run eagerly"
    ]
