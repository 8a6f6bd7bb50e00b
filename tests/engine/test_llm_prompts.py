"""What `LLM.generate` takes, what it refuses by name, and that a refusal disturbs nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.drained import Drained
from support.toy_model import ToyTable, save_toy

from core_runner import LLM, Engine, QueueFullError, RequestError, RunnerConfig, SamplingParams
from core_runner.request import Request
from model_states import PluginManager

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [4], [9, 8, 7, 6, 5, 4, 3, 2, 1]]


@pytest.fixture
def llm(toy_options: dict[str, Any], drained: Drained) -> LLM:
    return drained(**toy_options, max_num_reqs=3, max_model_len=64)


def _ids(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, **options)]


def test_forms_of_a_prompt(llm: LLM, toy_table: ToyTable) -> None:
    one = [5, 6, 7]
    want = [toy_table.greedy(one, 6)]
    forms = [
        one, tuple(one), [one], [tuple(one)], np.array(one), [np.array(one)], torch.tensor(one), [torch.tensor(one)],
        {"prompt_token_ids": one}, [{"prompt_token_ids": np.array(one, np.uint8)}], np.array([one]), range(5, 8),
        {"prompt_token_ids": one, "model_inputs": {}},
    ]  # fmt: skip
    for form in forms:
        assert _ids(llm, form) == want, f"{form!r}"
    assert _ids(llm, []) == []
    assert _ids(llm, PROMPTS) == [toy_table.greedy(prompt, 6) for prompt in PROMPTS]
    output = llm.generate(np.array(one), GREEDY)[0]
    assert output.prompt_token_ids == one
    assert output.prompt is None
    assert output.finished


def test_parameters_for_each_prompt(llm: LLM, toy_table: ToyTable) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 9, 4)]
    want = [toy_table.greedy(prompt, n) for prompt, n in zip(PROMPTS, (1, 9, 4), strict=True)]
    assert _ids(llm, PROMPTS, params) == want
    # Without parameters: what the checkpoint recommends, greedy here, and the default length.
    assert _ids(llm, PROMPTS, None) == [toy_table.greedy(prompt, 16) for prompt in PROMPTS]


def test_max_tokens_none_fills_the_model(llm: LLM, toy_table: ToyTable) -> None:
    (output,) = llm.generate([5, 6], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert output.outputs[0].token_ids == toy_table.greedy([5, 6], 62)
    assert output.outputs[0].finish_reason == "length"


def test_stop_token_ids_and_eos(
    toy_table: ToyTable, toy_options: dict, tmp_path: Any, drained: Drained
) -> None:
    tokens = toy_table.greedy([5, 6, 7], 20)
    eos = next(t for i, t in enumerate(tokens) if i >= 4 and t not in tokens[:i])
    stop = next(t for i, t in enumerate(tokens) if i >= 2 and t not in [*tokens[:i], eos])
    llm = drained(**toy_options | {"model": save_toy(tmp_path, 50, eos_token_id=eos)})
    cases = [
        ({}, eos, None),
        ({"ignore_eos": True}, None, None),
        ({"stop_token_ids": [stop, 3]}, stop, stop),
        ({"stop_token_ids": [stop], "ignore_eos": True}, stop, stop),
    ]
    for options, last, reason in cases:
        params = SamplingParams(temperature=0.0, max_tokens=20, **options)
        (completion,) = llm.generate([5, 6, 7], params)[0].outputs
        want = tokens if last is None else tokens[: tokens.index(last) + 1]
        assert completion.token_ids == want, f"{options}"
        assert completion.finish_reason == ("length" if last is None else "stop")
        assert completion.stop_reason == reason


# prompts -> words of the refusal
BAD_PROMPTS: list[tuple[Any, str]] = [
    ([[]], "empty"),
    ([[1] * 64], r"64 tokens.*max_model_len=64"),
    ([[50]], r"token id 50.*vocabulary of 50"),
    ([[-1]], "-1"),
    ([[2**40]], "1099511627776"),
    ([[1.5, 2.0]], "float64"),
    ([[True, False]], "bool"),
    ([[1, [2]]], "prompt_token_ids"),
    ([[[1, 2]]], r"\[1, 2\]"),
    ([["a", "b"]], "prompt_token_ids"),
    ([None], "None"),
    ([1.5], "1.5"),
    ({"prompt": "x"}, "'prompt'"),
    ({"prompt_token_ids": None}, "None"),
    ({"prompt_token_ids": "abc"}, "abc|prompt_token_ids"),
    ({"prompt_token_ids": [1], "model_inputs": 3}, "model_inputs=3"),
    ("text without a tokenizer", "tokenizer"),
]


@pytest.mark.parametrize(("bad", "says"), BAD_PROMPTS)
def test_bad_prompts_are_refused_before_anything_starts(
    bad: Any, says: str, toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    llm = drained(**toy_options, max_model_len=64)
    steps = llm.stats().steps
    many = bad if isinstance(bad, list) else [bad]
    for prompts in (bad, [PROMPTS[0], *many, PROMPTS[1]]):
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestError, match=says):
                call(prompts, GREEDY)
    assert llm.stats().steps == steps, "nothing ran"
    first, refused, last = llm.generate([PROMPTS[0], *many, PROMPTS[1]], GREEDY, on_bad_prompt="return")
    assert [o.outputs[0].token_ids for o in (first, last)] == [toy_table.greedy(p, 6) for p in PROMPTS[:2]]
    assert refused.outputs[0].finish_reason == "error"
    assert refused.outputs[0].token_ids == []
    assert refused.error
    assert refused.finished
    assert first.error is last.error is None


@pytest.mark.parametrize(
    ("prompts", "params", "options", "says"),
    [
        (None, GREEDY, {}, "None"),
        (5, GREEDY, {}, "5"),
        (PROMPTS, [GREEDY], {}, "1 sampling_params for 3 prompts"),
        (PROMPTS, [], {}, "0 sampling_params for 3 prompts"),
        (PROMPTS, {"temperature": 0}, {}, "must be a SamplingParams"),
        (PROMPTS, "greedy", {}, "sampling_params='greedy' must be"),
        (PROMPTS, [GREEDY, None, GREEDY], {}, "sampling_params.*None"),
        (PROMPTS, GREEDY, {"on_bad_prompt": "ignore"}, "on_bad_prompt='ignore'"),
    ],
)
def test_bad_calls_are_refused(prompts: Any, params: Any, options: Any, says: str, llm: LLM) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=says):
            call(prompts, params, **options)


def test_all_prompts_bad(llm: LLM) -> None:
    outputs = llm.generate([[], [50], []], GREEDY, on_bad_prompt="return")
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 3
    deltas = list(llm.stream([[], [50]], GREEDY, on_bad_prompt="return"))
    assert [(d.request_index, d.finish_reason) for d in deltas] == [(0, "error"), (1, "error")]


def test_progress_counts_up(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate([*PROMPTS, [50]], GREEDY, progress=lambda *at: seen.append(at), on_bad_prompt="return")
    assert seen == [(i, 4) for i in range(1, 5)]


def test_many_prompts_through_a_short_queue(
    toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    llm = drained(**toy_options, max_num_reqs=2, max_waiting=2)
    prompts = [[i, i + 1] for i in range(1, 11)]
    assert _ids(llm, prompts) == [toy_table.greedy(prompt, 6) for prompt in prompts]


def test_full_queue_is_refused_and_changes_nothing(toy_options: dict[str, Any], toy_table: ToyTable) -> None:
    options = {name: value for name, value in toy_options.items() if name != "plugins"}
    config = RunnerConfig(**options, max_num_reqs=1, max_waiting=2)
    engine = Engine(config, plugins=PluginManager(plugins=toy_options["plugins"]))
    requests = [Request(f"r{i}", [i + 1, 2], GREEDY) for i in range(3)]
    engine.add_request(requests[0])
    engine.add_request(requests[1])
    for again in (requests[2], requests[2]):
        with pytest.raises(QueueFullError, match="max_waiting=2"):
            engine.add_request(again)
    with pytest.raises(RequestError, match="'r0'"):
        engine.add_request(Request("r0", [3], GREEDY))
    engine.step()
    engine.add_request(requests[2])
    while engine.has_unfinished:
        engine.step()
    for request in requests:
        assert request.output_token_ids == toy_table.greedy(request.prompt_token_ids.tolist(), 6)
    assert engine.stats().free_slots == 1


def test_priority_runs_the_urgent_first(
    toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    prompts = [[i, 3] for i in range(1, 6)]
    priorities = [3, 1, 2, 0, 1]
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, priority=p) for p in priorities]
    for policy, order in (("fcfs", [0, 1, 2, 3, 4]), ("priority", [3, 1, 4, 2, 0])):
        llm = drained(**toy_options, max_num_reqs=1, policy=policy)
        deltas = [d for d in llm.stream(prompts, params) if d.output is not None]
        assert [d.request_index for d in deltas] == order, policy
        for delta in deltas:
            assert delta.output.outputs[0].token_ids == toy_table.greedy(prompts[delta.request_index], 3)
