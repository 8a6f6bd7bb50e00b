"""The whole path on a GPU: compiled kernels, no host synchronisation, tokens equal to transformers'."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.drained import Drained
from support.reference import assert_exact, greedy_reference
from support.tiny_models import TINY, save_tiny

from core_runner import SamplingParams
from core_runner.request import Request

pytestmark = pytest.mark.gpu
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)


def _prompts(count: int = 6) -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(3, 211) for _ in range(draw.randrange(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("name", TINY)
def test_equals_transformers_generate(name: str, tmp_path: Path, drained: Drained) -> None:
    # Head sizes of at least 16 are what the tensor cores' tiles can take.
    model = save_tiny(name, tmp_path).to("cuda")
    prompts = _prompts()
    references = [greedy_reference(model, prompt, MAX_TOKENS) for prompt in prompts]
    llm = drained(
        str(tmp_path),
        device="cuda",
        dtype="float32",
        block_size=16,
        max_num_reqs=4,
        max_model_len=128,
        max_num_batched_tokens=23,
        num_blocks=17,
    )
    skipped = 0
    for _ in ("cold", "warm"):
        for output, reference in zip(llm.generate(prompts, GREEDY), references, strict=True):
            skipped += assert_exact(output.outputs[0], reference, name)
    assert skipped <= MAX_TOKENS


def test_steps_never_synchronise(tmp_path: Path, drained: Drained) -> None:
    save_tiny("llama", tmp_path)
    # Poisoning looks up block ids on the host, so it is off here.
    options = {"max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 40, "poison": False}
    llm = drained(str(tmp_path), device="cuda", **options)
    mixed = [
        SamplingParams(
            temperature=t,
            top_k=k,
            top_p=p,
            min_p=m,
            seed=5,
            max_tokens=24,
            logprobs=n,
            prompt_logprobs=n,
            ignore_eos=True,
        )
        for t, k, p, m, n in [
            (0, 0, 1, 0, None),
            (0.8, 20, 1, 0, 3),
            (1, 0, 0.9, 0, None),
            (1, 0, 1, 0.1, None),
        ]
    ]
    runner = llm.engine.runner
    execute, sample = runner.execute_model, runner.sample_tokens

    def strict(function):
        def call(*args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    # Rare options keep the sampler out of the graph: first half without, second half with them.
    params = [mixed[0], *mixed[2:], mixed[0]] * 10 + mixed * 10
    # Loading a kernel synchronises, and so does recording a graph: every shape is met before.
    for _ in range(3):
        llm.generate(_prompts(80), params)
    first = llm.stats()
    runner.execute_model, runner.sample_tokens = strict(execute), strict(sample)
    try:
        outputs = llm.generate(_prompts(80), params)
    finally:
        runner.execute_model, runner.sample_tokens = execute, sample
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
    last = llm.stats()
    assert last.steps - first.steps >= 200
    assert last.step_ways["step graph"] - first.step_ways["step graph"] > 20
    assert last.step_ways["forward graph"] - first.step_ways["forward graph"] > 20


def test_async_equals_sync(tmp_path: Path, drained: Drained) -> None:
    save_tiny("qwen3", tmp_path)
    results = []
    for async_scheduling in (True, False):
        llm = drained(
            str(tmp_path),
            device="cuda",
            dtype="float32",
            max_model_len=128,
            num_blocks=12,
            max_num_reqs=4,
            async_scheduling=async_scheduling,
        )
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=30)
        results.append([o.outputs[0].token_ids for o in llm.generate(_prompts(10), params)])
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_graphs_equal_eager_with_padding_and_stale_buffers(
    name: str, tmp_path: Path, drained: Drained
) -> None:
    """Field report C-02: after a full batch the buffers hold its rows; smaller batches must not see them."""
    save_tiny(name, tmp_path)
    results = []
    for cuda_graphs in (True, False):
        options = {"dtype": "float32", "max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}
        llm = drained(str(tmp_path), device="cuda", cuda_graphs=cuda_graphs, **options)
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True, logprobs=1)
        outputs = [llm.generate(_prompts(count), params) for count in (8, 3, 5, 6, 7, 1)]
        results.append([output.outputs[0].token_ids for batch in outputs for output in batch])
        assert bool(llm.engine.runner.graphs.graphs) == cuda_graphs
    assert results[0] == results[1]


def test_replays_equal_eager_steps_also_with_prefill_in_them(tmp_path: Path, drained: Drained) -> None:
    save_tiny("qwen3", tmp_path)
    params = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=5, top_p=0.8, seed=4, max_tokens=17, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
        SamplingParams(temperature=0.7, min_p=0.2, seed=5, max_tokens=5, ignore_eos=True),
    ]
    results = []
    for cuda_graphs in (True, False):
        options = {"dtype": "float32", "max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}
        llm = drained(str(tmp_path), device="cuda", cuda_graphs=cuda_graphs, **options)
        outputs = [llm.generate(_prompts(count), params * (count // 4)) for count in (40, 8, 40)]
        results.append([output.outputs[0].token_ids for batch in outputs for output in batch])
        ways = llm.stats().step_ways
        kinds = {graph.shape.max_query_len > 1 for graph in llm.engine.runner.graphs.graphs}
        assert (ways.get("step graph", 0) > 50, kinds == {True, False}) == (cuda_graphs, cuda_graphs)
    assert results[0] == results[1]


def test_a_steady_decode_step_is_one_launch(tmp_path: Path, drained: Drained) -> None:
    """256 requests: one graph, the copy of what changed on the host, the copy of the tokens, and events."""
    save_tiny("llama", tmp_path)
    llm = drained(str(tmp_path), device="cuda", max_num_reqs=256, max_model_len=128, poison=False)
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=100, ignore_eos=True)
    draw = random.Random(3)
    for index in range(256):
        prompt = [draw.randrange(3, 211) for _ in range(4)]
        llm.engine.add_request(Request(f"r{index}", prompt, params))
    for _ in range(30):
        llm.engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    num_steps = 20
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(num_steps):
            llm.engine.step()
    calls = Counter(event.key for event in profile.key_averages() for _ in range(event.count))
    launches = sum(
        count for name, count in calls.items() if name.startswith(("cudaGraphLaunch", "cuGraphLaunch"))
    )
    kernels = sum(count for name, count in calls.items() if "LaunchKernel" in name)
    copies = sum(count for name, count in calls.items() if name.startswith("cudaMemcpy"))
    assert launches == num_steps
    # A staged write of new blocks is a copy and a kernel, in the steps that cross a block's edge.
    assert kernels <= num_steps
    assert copies <= 4 * num_steps
    llm.engine.abort_all()
