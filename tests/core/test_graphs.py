"""Which steps share a graph, when one is recorded, and what happens where none can be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.drained import Drained
from support.replays import HostRecorder, replayed_steps
from support.tiny_models import save_tiny

from core_runner import RunnerConfig, SamplingParams
from core_runner.errors import ConfigError
from core_runner.graphs import StepGraphs, StepShape
from core_runner.loader import use_graphs
from core_runner.scheduling.output import SchedulerOutput
from model_states.errors import CapabilityError


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


def _uses_graphs(cuda_graphs: bool | None, device: str, *capabilities: str) -> bool:
    """Of a model state with these capabilities that is loaded to the device, which need not be there."""
    body = {"name": "stub", "capabilities": frozenset(capabilities)}
    state: Any = type("Stub", (), body)()
    state.config = SimpleNamespace(device=torch.device(device))
    return use_graphs(RunnerConfig(model="any", cuda_graphs=cuda_graphs), state)


@pytest.mark.parametrize(
    ("cuda_graphs", "device", "uses"),
    [
        (None, "cuda", True),
        (True, "cuda:1", True),
        (False, "cuda", False),
        (None, "cpu", False),
        (False, "cpu", False),
    ],
)
def test_graphs_are_for_a_gpu_unless_they_are_switched_off(
    cuda_graphs: bool | None, device: str, uses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert _uses_graphs(cuda_graphs, device, "graphs", "prefix_cache") == uses
    assert not caplog.text


@pytest.mark.parametrize("capabilities", [(), ("graphs",)])
def test_graphs_that_are_asked_for_need_a_gpu(capabilities: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"cuda_graphs=True needs a GPU, and the device is cpu; leave it out"
    ):
        _uses_graphs(True, "cpu", *capabilities)


def test_a_model_state_without_graphs_gets_none_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU it is logged, unless graphs are off anyway; who asks for them by name is refused."""
    assert not _uses_graphs(False, "cuda", "prefix_cache")
    assert not _uses_graphs(None, "cpu", "prefix_cache")
    assert not caplog.text
    assert not _uses_graphs(None, "cuda", "prefix_cache")
    assert "model state 'stub' has no graphs" in caplog.text
    with pytest.raises(
        CapabilityError, match=r"'stub' has no graphs .*; it has: prefix_cache\. Switch it off"
    ):
        _uses_graphs(True, "cuda", "prefix_cache")


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


class Failing(HostRecorder):
    """Fails those recordings, counted from 0, that it is told to; `is_lost` is the end of the device."""

    def __init__(self, *failing: int, is_lost: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.failing, self.is_lost, self.num_tried = failing, is_lost, 0

    def record(self, body):
        self.num_tried += 1
        if self.num_tried - 1 in self.failing:
            raise torch.OutOfMemoryError("out of memory\nand its details")
        return body

    def free_bytes(self) -> int:
        if self.is_lost and self.num_tried:
            raise RuntimeError("an illegal memory access was encountered")
        return 0


def test_what_cannot_be_recorded_runs_eagerly_and_what_can_is_replayed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder, body = Failing(1, 2), Count()
    graphs = make(recorder=recorder)
    one, two, four = (graphs.decode_shape(rows) for rows in (1, 2, 4))
    calls = 0
    for _ in range(4):
        for shape in (one, two, four):
            calls += 1
            assert graphs.run("step", shape, "plain", body) == calls
    assert [(graph.shape, graph.num_replays) for graph in graphs.graphs] == [(one, 3)]
    assert recorder.num_tried == 3, "a recording that failed is not tried again"
    assert [graphs.is_refused("step", shape, "plain") for shape in (one, two, four)] == [False, True, True]
    assert not graphs.is_refused("step", two, "filtered")
    assert graphs.enabled
    assert graphs.shape(step(1)) == one
    assert graphs.counts["eager: this step cannot be recorded"] == 6
    assert graphs.report().count("not recorded: out of memory\n") == 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "a step of 2 tokens in 2 rows cannot be recorded as a CUDA graph (out of memory)" in warning


def test_a_scope_that_keeps_failing_is_given_up_and_the_other_is_not() -> None:
    recorder, body = Failing(*range(1, 100)), Count()
    graphs = make(recorder=recorder)
    for _ in range(2):
        for rows in graphs.decode_rows:
            graphs.run("step", graphs.decode_shape(rows), "plain", body)
    assert recorder.num_tried == 1 + 8
    assert graphs.counts["step graph"] == 1, "the first was recorded and stays"
    refused = [graphs.is_refused("step", graphs.decode_shape(rows), "plain") for rows in graphs.decode_rows]
    assert refused == [False, *[True] * (len(refused) - 1)]
    assert graphs.counts["eager: this step cannot be recorded"] == len(refused) - 1 + len(refused) - 9
    assert "no further graph of a step is recorded after 8 that failed" in graphs.report()
    recorder.failing = ()
    for _ in range(2):
        graphs.run("forward", graphs.decode_shape(4), "", body)
    assert graphs.counts["forward graph"] == 1


def test_a_device_that_a_recording_has_lost_ends_the_step() -> None:
    graphs = make(recorder=Failing(0, is_lost=True))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graphs.run("step", graphs.decode_shape(1), "plain", Count())


def test_graphs_with_prefill_are_bounded_and_decode_is_recorded_beyond_them() -> None:
    graphs, body = make(), Count()
    for _ in range(3):
        for tokens in range(16, 16 + 140):
            graphs.run("step", StepShape(tokens, 16, tokens), "plain", body)
    assert len(graphs.graphs) == 128
    assert graphs.counts["step graph"] == 128
    assert graphs.counts["eager: no more graphs with prefill"] == 140 - 128 + 12
    assert "128 of at most 128 graphs with prefill" in graphs.report()
    for _ in range(2):
        graphs.run("step", graphs.decode_shape(1), "plain", body)
    assert graphs.counts["step graph"] == 129


def test_a_step_that_cannot_be_recorded_replays_its_forward(drained: Drained, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    options = {"device": "cpu", "max_model_len": 64, "max_num_reqs": 4}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with replayed_steps(), patch("core_runner.runner.CudaRecorder", lambda device, urgent: Failing(0)):
        llm = drained(str(tmp_path), **options)
    (output,) = llm.generate([[5, 6, 7]], params)
    eager = drained(str(tmp_path), cuda_graphs=False, **options).generate([[5, 6, 7]], params)
    assert output.outputs[0].token_ids == eager[0].outputs[0].token_ids
    ways = llm.stats().step_ways
    assert ways["forward graph"] >= 15
    assert "step graph" not in ways
