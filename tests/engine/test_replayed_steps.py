"""Steps that are replayed as graphs give what eager steps give; on a CPU, by `support.replays`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.drained import Drained
from support.replays import replayed_steps
from support.whole_steps import fill_with_garbage, mixed_replays, ways_since

from core_runner import SamplingParams
from model_states import Component, InputBatch, hookimpl

if TYPE_CHECKING:
    from conftest import TinyModel

OPTIONS = {
    "device": "cpu",
    "block_size": 4,
    "max_num_reqs": 5,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
}
_draw = random.Random(8)
PROMPTS = [[_draw.randrange(3, 211) for _ in range(_draw.randrange(1, 30))] for _ in range(11)]
MIXED = [
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=5, top_p=0.8, seed=4, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.2, seed=5, max_tokens=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, seed=6, max_tokens=8, ignore_eos=True, repetition_penalty=1.4),
    SamplingParams(temperature=0.7, seed=7, max_tokens=8, ignore_eos=True, prompt_logprobs=1),
]


def _generate(llm: Any, params: list[SamplingParams]) -> list[list[int]]:
    wanted = [params[index % len(params)] for index in range(len(PROMPTS))]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, wanted)]


@pytest.fixture
def eager_tokens(llama: TinyModel, drained: Drained):
    return lambda params: _generate(drained(llama.directory, cuda_graphs=False, **OPTIONS), params)


@pytest.mark.parametrize(
    "params", [MIXED[2:3], MIXED[:1], MIXED[:3], MIXED], ids=["greedy", "seeded", "common", "all"]
)
def test_replayed_steps_equal_eager_ones(params, llama: TinyModel, drained: Drained, eager_tokens) -> None:
    with replayed_steps():
        llm = drained(llama.directory, **OPTIONS)
    # Rare options keep the sampler out of the graphs, and with it most steps of a batch that has some.
    scope = "forward" if params is MIXED else "step"
    before, mixed = llm.stats().step_ways, mixed_replays(llm, scope)
    for _ in range(2):  # the second time, the shapes of prefill steps have been met
        assert _generate(llm, params) == eager_tokens(params)
    ways = ways_since(llm, before)
    assert ways["step graph"] > 0
    assert ("forward graph" in ways) == (params is MIXED)
    assert mixed_replays(llm, scope) > mixed, "steps with a prefill in them are recorded too"


@pytest.mark.parametrize("params", [MIXED[:3], MIXED], ids=["common", "all"])
def test_padding_rows_of_a_replay_see_nobody(
    params, llama: TinyModel, drained: Drained, eager_tokens
) -> None:
    """Field report C-02: the buffers hold garbage where a smaller step than the last one does not write."""
    with replayed_steps():
        llm = drained(llama.directory, **OPTIONS)
    fill_with_garbage(llm.engine.runner)
    scope = "forward" if params is MIXED else "step"
    before, mixed = llm.stats().step_ways, mixed_replays(llm, scope)
    for _ in range(2):
        assert _generate(llm, params) == eager_tokens(params)
    assert ways_since(llm, before)[f"{scope} graph"] > 20
    assert mixed_replays(llm, scope) > mixed


class Watcher(Component):
    """Counts the steps that it is told of."""

    def __init__(self) -> None:
        self.steps = self.encoders = 0

    @hookimpl
    def run_encoder(self, batch: InputBatch) -> None:
        self.encoders += 1

    @hookimpl
    def after_forward(self, batch: InputBatch, hidden_states: torch.Tensor) -> None:
        self.steps += 1


class QuietWatcher(Watcher):
    records_step = True


@pytest.mark.parametrize("watcher", [Watcher(), QuietWatcher()], ids=["called", "recorded"])
def test_hooks_are_called_unless_they_may_be_recorded(
    watcher: Watcher, llama: TinyModel, drained: Drained, eager_tokens
) -> None:
    with replayed_steps():
        llm = drained(llama.directory, extensions=[watcher], **OPTIONS)
    assert _generate(llm, MIXED[:1]) == eager_tokens(MIXED[:1])
    ways, steps = llm.stats().step_ways, llm.stats().steps
    assert watcher.encoders == steps
    assert watcher.steps == steps  # this recorder's replays do call what was recorded
    assert ("step graph" in ways) == watcher.records_step
    assert ("forward graph" in ways) != watcher.records_step


def test_decode_graphs_at_start(llama: TinyModel, drained: Drained, eager_tokens) -> None:
    seen: list[tuple[str, int, int]] = []
    with replayed_steps():
        llm = drained(
            llama.directory,
            record_graphs_at_start=True,
            progress=lambda *args: seen.append(args),
            **OPTIONS,
        )
    graphs = llm.engine.runner.graphs
    sizes = [shape.num_reqs for shape in (graph.shape for graph in graphs.graphs) if shape.max_query_len == 1]
    assert sorted(sizes) == graphs.decode_rows == [1, 2, 4, 5]
    assert [args for args in seen if args[0] == "graphs"] == [("graphs", done, 4) for done in (1, 2, 3, 4)]
    assert _generate(llm, MIXED) == eager_tokens(MIXED)
