"""The second family through the same component: EXACT against transformers' generate for texts of any length."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drained import Drained
from support.encoder_decoder import encoder_runs, reference, save_text_model
from support.reference import Reference, assert_exact
from support.replays import replayed_steps
from support.whole_steps import mixed_replays, ways_since

from core_runner import LLM, SamplingParams
from core_runner.errors import RequestError

MAX_TOKENS = 9
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
OPTIONS = {"device": "cpu", "block_size": 4, "max_num_reqs": 4, "max_num_batched_tokens": 24}
_draw = random.Random(3)


def _ids(count: int) -> list[int]:
    return [_draw.randrange(4, 211) for _ in range(count)]


# (text to read, decoder prompt)
CASES = [
    (_ids(length), [3, *_ids(more)]) for length, more in ((1, 0), (32, 4), (7, 11), (20, 1), (2, 0), (31, 17))
]
MakeLLM = Callable[..., LLM]
Oracle = Callable[[Sequence[int], Sequence[int], int], Reference]


def _ask(text: Sequence[int], prompt: Sequence[int]) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt), "model_inputs": {"encoder_input_ids": list(text)}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Oracle]:
    directory: Path = tmp_path_factory.mktemp("text")
    model = save_text_model(directory)

    @cache
    def compute(text: tuple[int, ...], prompt: tuple[int, ...], max_tokens: int) -> Reference:
        ids = torch.tensor([text])
        return reference(model, prompt, max_tokens, input_ids=ids, attention_mask=torch.ones_like(ids))

    return str(directory), lambda text, prompt, max_tokens: compute(tuple(text), tuple(prompt), max_tokens)


@pytest.fixture
def text_llm(checkpoint: tuple[str, Oracle], drained: Drained) -> MakeLLM:
    return lambda **options: drained(checkpoint[0], probe=_ask([9, 8, 7], [3, 5]), **{**OPTIONS, **options})


@pytest.fixture
def check(checkpoint: tuple[str, Oracle]) -> Callable[..., None]:
    """Whether outputs equal the oracle's."""

    def compare(outputs: Sequence[Any], cases: Sequence[Any] = CASES, max_tokens: int = MAX_TOKENS) -> None:
        skipped = 0
        for (text, prompt), output in zip(cases, outputs, strict=True):
            for completion in output.outputs:
                skipped += assert_exact(
                    completion, checkpoint[1](text, prompt, max_tokens), f"{len(text)} ids"
                )
        assert skipped <= max_tokens

    return compare


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 5},
        {"model_options": {"cross_attention_cache": "hidden_states"}},
    ],
    ids=str,
)
def test_equals_transformers_generate(
    options: dict[str, Any], text_llm: MakeLLM, check: Callable[..., None]
) -> None:
    llm = text_llm(**options)
    for _ in ("cold", "warm"):
        check(llm.generate([_ask(*case) for case in CASES], GREEDY))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5}, {"max_num_reqs": 2}], ids=str)
def test_requests_that_arrive_while_others_run(
    options: dict[str, Any], text_llm: MakeLLM, check: Callable[..., None]
) -> None:
    llm = text_llm(**options)
    first = llm.stream([_ask(*case) for case in CASES[:2]], GREEDY)
    early = [next(first) for _ in range(5)]
    assert llm.stats().running == 2
    check(llm.generate([_ask(*case) for case in CASES[2:]], GREEDY), CASES[2:])
    outputs = {delta.request_index: delta.output for delta in [*early, *first] if delta.output is not None}
    check([outputs[0], outputs[1]], CASES[:2])


def test_steps_are_replayed(text_llm: MakeLLM, check: Callable[..., None]) -> None:
    with replayed_steps():
        llm = text_llm()
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    before, mixed = llm.stats().step_ways, mixed_replays(llm)
    for _ in range(3):
        check(llm.generate([_ask(*case) for case in CASES], greedy))
    ways = ways_since(llm, before)
    assert ways["step graph"] > sum(ways.values()) // 2
    assert mixed_replays(llm) > mixed


def test_completions_and_duplicates_read_once(text_llm: MakeLLM, check: Callable[..., None]) -> None:
    llm = text_llm()
    before = encoder_runs(llm)
    greedy = SamplingParams(temperature=0.0, n=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    check(llm.generate([_ask(*case) for case in CASES[:3]], greedy), CASES[:3])
    assert encoder_runs(llm) == before + 3
    same = [(CASES[1][0], prompt) for _, prompt in CASES]
    prompts = [_ask(*case) for case in same]
    prompts[0]["model_inputs"]["encoder_input_ids"] = torch.tensor(CASES[1][0])
    prompts[1]["model_inputs"]["encoder_input_ids"] = np.array(CASES[1][0], np.int32)
    check(llm.generate(prompts, GREEDY), same)
    assert encoder_runs(llm) == before + 3


def test_preempted_in_the_middle(text_llm: MakeLLM, check: Callable[..., None]) -> None:
    llm = text_llm(enable_prefix_caching=False, max_num_reqs=3, num_blocks=10)
    before = encoder_runs(llm)
    cases = [CASES[2], CASES[1], CASES[0], CASES[3]]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    check(llm.generate([_ask(*case) for case in cases], greedy), cases, 20)
    assert llm.stats().preemptions > 0
    assert encoder_runs(llm) - before == len(cases)


def test_equal_prompts_about_different_texts(text_llm: MakeLLM, check: Callable[..., None]) -> None:
    llm = text_llm(enable_prefix_caching=True)
    prompt = CASES[5][1]
    cases = [(CASES[i][0], prompt) for i in (1, 3, 1, 3)]
    for case in cases:
        check(llm.generate([_ask(*case)], GREEDY), [case])
    assert llm.stats().cached_tokens == 2 * ((len(prompt) - 1) // 4 * 4)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "model_inputs has nothing; give"),
        ({"input_ids": [1]}, "model_inputs has 'input_ids'"),
        ({"encoder_input_ids": []}, "has 0 ids, and this model reads 1 to 32"),
        ({"encoder_input_ids": [5] * 33}, "has 33 ids"),
        ({"encoder_input_ids": [5, 211]}, r"ids outside \[0, 211\)"),
        ({"encoder_input_ids": [5, -1]}, "ids outside"),
        ({"encoder_input_ids": [[5], [6]]}, "flat sequence of integers, not int64 of shape"),
        ({"encoder_input_ids": [0.5]}, "flat sequence of integers, not float64"),
        ({"encoder_input_ids": "text"}, "flat sequence of integers"),
    ],
)
def test_bad_inputs_are_refused_by_name(inputs: dict[str, Any], message: str, text_llm: MakeLLM) -> None:
    with pytest.raises(RequestError, match=rf"request '.*': .*{message}"):
        text_llm().generate({"prompt_token_ids": [3], "model_inputs": inputs}, GREEDY)
