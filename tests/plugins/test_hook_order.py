"""What the runner calls, when, and with what: an extension beside the example plugin writes it down."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from core_runner import LLM, SamplingParams
from model_states import Component, PluginManager, hookimpl
from model_states.hook_names import HOT_HOOKS

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_plugin"


class Recorder(Component):
    """An extension that implements every hook and keeps its arguments."""

    def __init__(self):
        self.calls = []

    def note(self, hook, *arguments):
        self.calls.append((hook, arguments))

    def named(self, hook):
        return [arguments for name, arguments in self.calls if name == hook]

    @hookimpl
    def cache_groups(self):
        self.note("cache_groups")
        return []

    @hookimpl
    def init_caches(self, caches):
        self.note("init_caches", caches)

    @hookimpl
    def input_keys(self, request):
        self.note("input_keys", request.req_id, request.prompt_len, dict(request.model_inputs))
        return {}

    @hookimpl
    def reserve(self, request):
        self.note("reserve", request.req_id, dict(request.input_keys))
        return {}

    @hookimpl
    def expect_requests(self, requests):
        self.note("expect_requests", [request.req_id for request in requests])

    @hookimpl
    def add_request(self, slot, request):
        self.note("add_request", slot, request.req_id, request.prompt_len, list(request.prefill_token_ids))

    @hookimpl
    def remove_request(self, slot, reason):
        self.note("remove_request", slot, reason)

    @hookimpl
    def apply_staged_writes(self):
        self.note("apply_staged_writes")

    @hookimpl
    def preprocess_state(self, batch):
        self.note("preprocess_state", batch)

    @hookimpl
    def prepare_attn(self, batch):
        self.note("prepare_attn", batch)

    @hookimpl
    def prepare_inputs(self, batch):
        self.note("prepare_inputs", batch)
        return {}

    @hookimpl
    def prepare_dummy_inputs(self, num_reqs, num_tokens):
        self.note("prepare_dummy_inputs", num_reqs, num_tokens)
        return {}

    @hookimpl
    def run_encoder(self, batch):
        self.note("run_encoder", batch)

    @hookimpl
    def after_forward(self, batch, hidden_states):
        self.note("after_forward", batch, tuple(hidden_states.shape), len(batch.input_ids))

    @hookimpl
    def postprocess_state(self, batch, num_sampled, num_rejected):
        self.note("postprocess_state", batch, num_sampled.tolist(), num_rejected.tolist())

    @hookimpl
    def custom_sampler(self, sampler):
        self.note("custom_sampler", sampler)
        return Constant(sampler)

    @hookimpl
    def logits_processors(self, config, vocab_size):
        self.note("logits_processors", config.max_num_reqs, vocab_size)
        return []


class Constant:
    """Samples what the wrapped sampler does, and says so."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.used = 0

    def sample(self, logits, batch):
        self.used += 1
        return self.sampler.sample(logits, batch)


@pytest.fixture
def toy(monkeypatch):
    """The example plugin, by call where it is not installed."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    installed = {row.name for row in PluginManager().plugins()}
    return [] if "toy" in installed else [importlib.import_module("core_runner_toy")]


@pytest.fixture
def model(toy, tmp_path):
    return importlib.import_module("core_runner_toy.checkpoint").write_checkpoint(tmp_path)


def serve(model, toy, prompts, num_tokens, **options):
    recorder = Recorder()
    options = {"max_num_reqs": 2, "async_scheduling": False, "device": "cpu", **options}
    llm = LLM(str(model), plugins=toy, extensions=[recorder], **options)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens))
    return recorder, llm, [list(output.outputs[0].token_ids) for output in outputs]


STEP = (
    "apply_staged_writes",
    "run_encoder",
    "preprocess_state",
    "prepare_attn",
    "prepare_inputs",
    "after_forward",
    "postprocess_state",
)


def test_hooks_run_in_the_documented_order(model, toy):
    recorder, llm, _ = serve(model, toy, [[1, 2, 3, 4, 5]], 2, max_num_batched_tokens=3)
    names = [name for name, _ in recorder.calls]
    start = names.index("add_request")
    assert names[:3] == ["cache_groups", "logits_processors", "custom_sampler"]
    assert names[start - 3 : start] == ["input_keys", "reserve", "expect_requests"]
    assert set(names[3 : start - 3]) <= {"init_caches", "prepare_attn", "prepare_dummy_inputs", "input_keys"}
    # Two chunks of the prompt, then one step for the second token.
    between = ("add_request", "remove_request", "expect_requests")
    steps = [name for name in names[start:] if name not in between]
    assert steps[: 3 * len(STEP)] == list(STEP) * 3
    assert set(steps[3 * len(STEP) :]) <= {"apply_staged_writes"}
    assert names[start + 1] == "apply_staged_writes"
    assert llm.engine.runner.sampler.used > 0
    assert set(names) | {"prepare_dummy_inputs", "remove_request"} == set(HOT_HOOKS)


def test_caches_are_those_that_were_asked_for(model, toy):
    recorder, llm, _ = serve(model, toy, [[1]], 1, num_blocks=5)
    [caches] = recorder.named("init_caches")[-1]
    ids = caches["history"]["tokens"]["ids"]
    assert ids.shape == (5, llm.config.block_size)
    assert ids.dtype == torch.int64


def test_paired_hooks_name_the_same_slot_and_the_reason(model, toy):
    recorder, _, _ = serve(
        model, toy, [[1] * 20, [2] * 20], 30, num_blocks=5, max_model_len=64, max_num_batched_tokens=32
    )
    owner, seen = {}, []
    for name, arguments in recorder.calls:
        if name == "add_request":
            slot, req_id, prompt_len, tokens = arguments
            assert slot not in owner
            owner[slot] = req_id
            seen.append((req_id, prompt_len, len(tokens)))
        elif name == "remove_request":
            owner.pop(arguments[0])
    reasons = [reason for _, reason in recorder.named("remove_request")]
    assert "preempted" in reasons
    assert set(reasons) <= {"preempted", "finished"}
    # One that comes back brings what it had generated, and still says how long the user's prompt was.
    assert {prompt_len for _, prompt_len, _ in seen} == {20}
    assert any(prefill_len > 20 for _, _, prefill_len in seen)


def test_batches_and_results_have_the_documented_shapes(model, toy):
    recorder, _, _ = serve(model, toy, [[1, 2, 3], [4] * 9], 3, max_num_batched_tokens=8)
    for batch, shape, num_tokens in recorder.named("after_forward"):
        assert shape == (num_tokens, 1)
        assert batch.num_tokens <= num_tokens
    sampled = [rows for _, rows, _ in recorder.named("postprocess_state")]
    assert sum(map(sum, sampled)) >= 6
    assert any(0 in rows for rows in sampled), "a chunk that is not the last one samples nothing"
    assert all(not any(rejected) for _, _, rejected in recorder.named("postprocess_state"))


def test_requests_that_wait_are_expected(model, toy):
    recorder, _, _ = serve(model, toy, [[1], [2], [3]], 2, max_num_reqs=1)
    expected = [ids for (ids,) in recorder.named("expect_requests")]
    assert expected[0] == ["request-1", "request-2"]
    assert ["request-2"] in expected
    assert expected[-1] == []


class Gate(Component):
    """Names model inputs, and lets requests in one at a time."""

    input_names = None

    def __init__(self):
        self.held = self.set_aside = 0

    @hookimpl
    def input_keys(self, request):
        if "bad" in request.model_inputs:
            raise ValueError("leave 'bad' out")
        return {"gate": repr(request.model_inputs).encode()}

    @hookimpl
    def reserve(self, request):
        if self.held + self.set_aside:
            return {"gate": "one request is inside"}
        self.set_aside = 1
        return {}

    @hookimpl
    def add_request(self, slot):
        self.held += 1

    @hookimpl
    def remove_request(self, slot):
        self.held -= 1

    @hookimpl
    def apply_staged_writes(self):
        self.set_aside = 0


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_short_makes_requests_wait(is_async, model, toy):
    gate, recorder = Gate(), Recorder()
    options = {"max_num_reqs": 4, "device": "cpu", "async_scheduling": is_async}
    llm = LLM(str(model), plugins=toy, extensions=[gate, recorder], **options)
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    prompts = [[1, 2], [3, 4, 5], [6]]
    together = llm.generate(prompts, greedy)
    assert [len(output.outputs[0].token_ids) for output in together] == [3, 3, 3]
    assert {batch.num_reqs for (batch,) in recorder.named("run_encoder")} == {1}
    assert (gate.held, gate.set_aside) == (0, 0)
    assert together[1].outputs[0].token_ids == llm.generate(prompts[1], greedy)[0].outputs[0].token_ids


def test_inputs_that_a_hook_refuses_are_refused_before_anything_starts(model, toy):
    llm = LLM(str(model), plugins=toy, extensions=[Gate()], device="cpu")
    with pytest.raises(ValueError, match="request 'request-1': leave 'bad' out"):
        llm.generate([[1], {"prompt_token_ids": [2], "model_inputs": {"bad": 1}}])
    assert llm.stats().steps == 0


class Reader(Component):
    """Reads one model input."""

    input_names = frozenset({"notes"})


@pytest.mark.parametrize(
    ("extensions", "help"), [([], "it takes tokens alone"), ([Reader()], "give only notes")]
)
def test_inputs_that_nobody_reads_are_refused_by_name(extensions, help, model, toy):
    llm = LLM(str(model), plugins=toy, extensions=extensions, device="cpu")
    named = {"prompt_token_ids": [2], "model_inputs": {"audoi": 1, "notes": 2}}
    with pytest.raises(ValueError, match=rf"request 'request-0': model_inputs has audoi.*{help}"):
        llm.generate([named])
    assert llm.stats().steps == 0
    if extensions:
        del named["model_inputs"]["audoi"]
        assert len(llm.generate([named], SamplingParams(max_tokens=2))) == 1
