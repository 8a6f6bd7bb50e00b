"""The whole path on a GPU: compiled kernels, no host synchronisation, tokens equal to transformers'."""

from __future__ import annotations

import importlib
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drained import Drained
from support.never_waiting import never_waiting
from support.odd_ids import OddIds
from support.reference import assert_exact, greedy_reference
from support.tiny_models import TINY, save_tiny
from support.toy_model import ToyPlugin, ToyTable, save_toy
from support.whole_steps import check_whole_steps, fill_with_garbage, mixed_replays, ways_since

from core_runner import LLM, SamplingParams
from core_runner.request import Request
from model_states.errors import CapabilityError
from model_states.recording import CudaRecorder

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
    # Log-probabilities are computed behind a graph of the forward; without them a graph holds all of a step.
    assert llm.stats().step_ways["forward graph"] > 0
    check_whole_steps(llm, prompts, references, name)


# What a request asks for -> where its sampling may run: "step" inside of a step's graph, "forward" behind a graph.
MIXED = {
    "greedy": ("step", {"temperature": 0.0}),
    "top_k": ("step", {"top_k": 5, "top_p": 0.9}),
    "top_p": ("step", {"top_p": 0.9}),
    "min_p": ("step", {"min_p": 0.1}),
    "logprobs": ("forward", {"temperature": 0.8, "top_k": 20, "logprobs": 3, "prompt_logprobs": 3}),
    "penalties": (
        "forward",
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.1},
    ),
    "bias": ("forward", {"logit_bias": {7: 1.5, 9: -2.0}, "min_tokens": 5}),
    "bad words": ("forward", {"bad_words": [[7], [8, 9], [10, 11, 12]]}),
    "allowed": ("forward", {"allowed_token_ids": list(range(3, 99))}),
    "processor": ("forward", {"logits_processors": {"no_repeat": {"window": 8}}}),
    "grammar": ("forward", {"structured_output": {"regex": "odd ids"}, "ignore_eos": False}),
}


def _params(name: str) -> SamplingParams:
    options: dict[str, Any] = {"seed": 5, "max_tokens": 24, "ignore_eos": True, **MIXED[name][1]}
    return SamplingParams(**options)


def test_steps_never_synchronise(tmp_path: Path, drained: Drained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "logits_processor"))
    save_tiny("llama", tmp_path)
    # Poisoning looks up block ids on the host, so it is off here.
    options = {"max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 40, "poison": False}
    extension = importlib.import_module("no_repeat").NoRepeatExtension()
    llm = drained(str(tmp_path), device="cuda", extensions=[extension], **options)
    llm.engine.grammars = OddIds(211)
    # Rare options keep the sampler out of the graph: first half without, second half with them.
    common = [name for name, (scope, _) in MIXED.items() if scope == "step"]
    names = [common[i % len(common)] for i in range(40)] + [list(MIXED)[i % len(MIXED)] for i in range(50)]
    params = [_params(name) for name in names]
    # Loading a kernel synchronises, and so does recording a graph: every shape is met before.
    for _ in range(3):
        llm.generate(_prompts(len(params)), params)
    before, steps, mixed = llm.stats().step_ways, llm.stats().steps, mixed_replays(llm)
    with never_waiting(llm.engine.runner) as counted:
        outputs = llm.generate(_prompts(len(params)), params)
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
    assert llm.stats().steps - steps >= 200
    assert counted.steps >= 200
    assert counted.masks > 20
    ways = ways_since(llm, before)
    assert min(ways["step graph"], ways["forward graph"]) > 20, ways
    assert mixed_replays(llm) > mixed, "no step with a prefill was replayed"
    for name, output in zip(names, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert name != "allowed" or set(tokens) <= set(range(3, 99))
        assert name != "bad words" or 7 not in tokens
        assert name != "grammar" or all(token % 2 for token in tokens)
        assert name != "processor" or all(tokens[i] not in tokens[max(i - 8, 0) : i] for i in range(24))


def test_steps_with_grammars_never_synchronise(drained: Drained) -> None:
    pytest.importorskip("llguidance")
    options = {"max_num_reqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64, "poison": False}
    llm = drained(device="cuda", num_blocks=129, **options)
    text = "Once upon a time there was a small fox who asked everyone: "
    patterns = [r"[A-Z][a-z]{2,8}-[0-9]{2}", r"(yes|no|maybe later)(, (yes|no)){1,3}"]
    # A neighbour in every step that follows no grammar, and may sample only in what the step's graph would.
    params = [
        SamplingParams(
            seed=i, max_tokens=40, structured_output=None if i % 3 == 2 else {"regex": patterns[i % 3]}
        )
        for i in range(24)
    ]
    for _ in range(3):
        llm.generate([text] * len(params), params)
    before = llm.stats().step_ways
    with never_waiting(llm.engine.runner) as counted:
        outputs = llm.generate([text] * len(params), params)
    assert counted.masks > 20
    assert ways_since(llm, before)["forward graph"] > 20
    for i, output in enumerate(outputs):
        completion = output.outputs[0]
        assert i % 3 == 2 or re.fullmatch(patterns[i % 3], completion.text), completion.text
        assert i % 3 == 2 or completion.finish_reason == "stop"


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
def test_graphs_equal_eager_with_padding_and_garbage(name: str, tmp_path: Path, drained: Drained) -> None:
    """Field report C-02: what lies in the buffers behind a step's own rows and tokens is seen by nobody."""
    save_tiny(name, tmp_path)
    results = []
    for cuda_graphs in (True, False):
        options = {"dtype": "float32", "max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}
        llm = drained(str(tmp_path), device="cuda", cuda_graphs=cuda_graphs, **options)
        if cuda_graphs:
            fill_with_garbage(llm.engine.runner)
        before, mixed = llm.stats().step_ways, mixed_replays(llm)
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
        outputs = [llm.generate(_prompts(count), params) for count in (8, 3, 5, 6, 7, 1)]
        results.append([output.outputs[0].token_ids for batch in outputs for output in batch])
        ways = ways_since(llm, before)
        assert (ways["step graph"] > 50, mixed_replays(llm) > mixed) == (cuda_graphs, cuda_graphs), ways
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


def test_a_broken_recording_spoils_no_other() -> None:
    recorder = CudaRecorder(torch.device("cuda"))
    x = torch.arange(8.0, device="cuda")
    replays = [recorder.record(lambda: x * 2)]
    for factor in (3, 4):
        with pytest.raises(RuntimeError):
            recorder.record(lambda: (x + 1).sum().item())  # waits for the device
        replays.append(recorder.record(lambda factor=factor: x * factor))
    for factor, replay in enumerate(replays, start=2):
        assert torch.equal(replay(), x * factor)


def test_a_model_state_without_graphs_runs_eagerly(tmp_path: Path, drained: Drained) -> None:
    table = ToyTable(50, seed=3)
    plugin = ToyPlugin(table)
    plugin.state.capabilities = plugin.state.capabilities - {"graphs"}
    options: dict[str, Any] = {"plugins": [plugin], "device": "cuda", "block_size": 16, "num_blocks": 33}
    llm = drained(save_toy(tmp_path, 50), **options)
    prompts = [[7, 3, 11, last] for last in range(1, 7)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert output.outputs[0].token_ids == table.greedy(prompt, 20)
    assert set(llm.stats().step_ways) == {"eager: no graphs"}
    assert not llm.engine.runner.graphs.graphs
    with pytest.raises(CapabilityError, match="'toy-logits' has no graphs"):
        LLM(str(tmp_path), cuda_graphs=True, **options)


# Calls of the CUDA API in a steady step, by the beginning of their names. Each step has these, and no more:
ONE_STEP = {"cudaGraphLaunch": 1, "cudaEventSynchronize": 1, "cudaStreamWaitEvent": 2}
# These only ask or mark, in a microsecond or two. How often is partly torch's business: as measured, and one more.
CHEAP = {"cudaStreamIsCapturing": 8, "cudaEventQuery": 1, "cudaEventRecord": 3}


def test_a_steady_decode_step_is_one_launch(tmp_path: Path, drained: Drained) -> None:
    """256 requests: one graph, the copies of the tokens and of whether they are good, one wait for an event."""
    save_tiny("llama", tmp_path)
    llm = drained(str(tmp_path), device="cuda", max_num_reqs=256, max_model_len=128, poison=False)
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=100, ignore_eos=True)
    draw = random.Random(3)
    for index in range(256):
        prompt = [draw.randrange(3, 211) for _ in range(4)]
        llm.engine.add_request(Request(f"r{index}", prompt, params))
    for _ in range(30):
        llm.engine.step()
    assert llm.stats().running == 256
    num_steps = 20
    calls = _cuda_calls(llm, num_steps)
    found = {name: calls.pop(name, 0) for name in (*ONE_STEP, *CHEAP, "cudaMemcpyAsync", "launch")}
    # The profiler itself waits for the device when it stops.
    assert calls.pop("cudaDeviceSynchronize", 0) <= 2
    assert not calls, f"beside {found}"
    assert {name: found[name] for name in ONE_STEP} == {n: num_steps * count for n, count in ONE_STEP.items()}
    # All requests cross the edge of a block in the same step, which writes new blocks by a copy and a kernel.
    assert found["launch"] <= 2, found
    assert 2 * num_steps <= found["cudaMemcpyAsync"] <= 2 * num_steps + 2, found
    for name, count in CHEAP.items():
        assert found[name] <= count * num_steps, found
    llm.engine.abort_all()


def _cuda_calls(llm: LLM, num_steps: int) -> Counter[str]:
    """Calls of the CUDA runtime and driver in the next steps, variants of a call under one name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(num_steps):
            llm.engine.step()
    calls: Counter[str] = Counter()
    for event in profile.key_averages():
        if re.match(r"cu(da)?[A-Z]", event.key) and event.device_type == torch.autograd.DeviceType.CPU:
            known = [name for name in (*ONE_STEP, *CHEAP) if event.key.startswith(name)]
            name = "launch" if "LaunchKernel" in event.key else (known or [event.key])[0]
            calls[name] += event.count
    return calls
