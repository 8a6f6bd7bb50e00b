"""Options that change logits through the whole engine: field reports A-03 and E-02, and every way a request can run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling.sampling_reference import adjusted_logits, reference_scores
from support.drained import Drained
from support.toy_model import ToyPlugin, ToyTable, save_toy, weight

from core_runner import LLM, RequestError, SamplingParams

VOCAB_SIZE, EOS = 32, 31
# Rejected drafts must not be counted either: the tests below take further values here when there is a drafter.
NUM_DRAFTS = [0]
ENDS_AT_3 = {"stop_token_ids": [3], "min_tokens": 1}
ORDINARY = [[i + 1, 2, 3 * i] for i in range(7)]


def slow_ids(
    table: ToyTable, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()
) -> list[int]:
    """The request alone, id by id, through the slow sampler."""
    output: list[int] = []
    stop = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    while len(output) < (params.max_tokens or 0) and not stop.intersection(output[-1:]):
        tokens = [*prompt, *output]
        key = sum(token * weight(place) for place, token in enumerate(tokens))
        logits = table.table[key % len(table.table)].tolist()
        adjusted = adjusted_logits(logits, params, prompt, output, eos)
        scores = reference_scores(adjusted, params, params.seed or 0, len(tokens))
        best, second = sorted(scores.values())[-1], sorted(scores.values())[-2:][0]
        assert len(scores) == 1 or best - second > 1e-4, "pick other inputs: this one is a near tie"
        output.append(max(scores, key=scores.__getitem__))
    return output


# ---- constraints that together forbid everything


@pytest.fixture(scope="module")
def table() -> ToyTable:
    return ToyTable(VOCAB_SIZE, seed=8)


@pytest.fixture(scope="module")
def options(table: ToyTable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = save_toy(tmp_path_factory.mktemp("options"), VOCAB_SIZE, eos_token_id=EOS)
    return {"model": directory, "plugins": [ToyPlugin(table)], "device": "cpu", "block_size": 4}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"allowed_token_ids": [5], "bad_words": [[5]]}, ["allowed_token_ids=(5,)", "bad_words=[(5,)]"]),
        ({"allowed_token_ids": [5, 6], "bad_words": [[5], [6]]}, ["allowed_token_ids=(5, 6)", "bad_words="]),
        ({"allowed_token_ids": []}, ["allowed_token_ids=()"]),
        ({"allowed_token_ids": [7], "logit_bias": {7: -math.inf}}, ["allowed_token_ids=(7,)", "logit_bias="]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens=9", "max_tokens=8"]),
        ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1}, ["allowed_token_ids=(3,)", "min_tokens="]),
        (
            {"allowed_token_ids": [3, 4, 5], "bad_words": [[4]], "logit_bias": {5: -math.inf}, **ENDS_AT_3},
            ["allowed_token_ids=(3, 4, 5)", "bad_words=", "logit_bias=", "min_tokens=1"],
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_every_option_named(given: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**given)
    assert all(option in str(error.value) for option in named), str(error.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, ["allowed_token_ids=(31,)", "min_tokens=2", "[31]"]),
        ({"bad_words": [[i] for i in range(31)], "min_tokens": 1}, ["bad_words=", "min_tokens=1"]),
        ({"bad_words": [[i] for i in range(32)]}, ["bad_words="]),
        ({"logit_bias": dict.fromkeys(range(32), -math.inf)}, ["logit_bias="]),
        ({"allowed_token_ids": [3, 32]}, ["allowed_token_ids", "32"]),
        ({"logit_bias": {99: 1.0}}, ["logit_bias", "99", "32"]),
        ({"bad_words": [[1, 2], [3, 40, 5]]}, ["bad_words", "40", "32"]),
    ],
)
def test_what_only_the_model_can_tell_is_refused_at_admission(
    given: dict[str, Any], named: list[str], options: dict[str, Any], table: ToyTable, drained: Drained
) -> None:
    llm, params = drained(**options), SamplingParams(**given)
    with pytest.raises(RequestError) as error:
        llm.generate([1, 2], params)
    assert all(option in str(error.value) for option in named), str(error.value)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    bad, *others = llm.generate([[1, 2], *ORDINARY], [params, *[greedy] * 7], on_bad_prompt="return")
    assert (bad.outputs[0].token_ids, bad.outputs[0].finish_reason) == ([], "error")
    assert all(option in bad.error for option in named)
    assert [o.outputs[0].token_ids for o in others] == [table.greedy(p, 6) for p in ORDINARY]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("company", [[], ORDINARY], ids=["alone", "with 7 others"])
def test_a_request_ends_with_an_error_where_nothing_is_left(
    company: list[list[int]],
    temperature: float,
    is_async: bool,
    options: dict[str, Any],
    table: ToyTable,
    drained: Drained,
) -> None:
    llm = drained(**options, async_scheduling=is_async)
    empties = SamplingParams(
        temperature=temperature, allowed_token_ids=[5], bad_words=[[5, 5]], seed=1, max_tokens=9
    )
    ordinary = SamplingParams(temperature=temperature, seed=4, max_tokens=9, ignore_eos=True)
    bad, *others = llm.generate([[1, 2, 3], *company], [empties, *[ordinary] * len(company)])
    (completion,) = bad.outputs
    assert (completion.token_ids, completion.finish_reason) == ([5], "error")
    assert "allowed_token_ids and bad_words" in bad.error
    for prompt, output in zip(company, others, strict=True):
        assert output.outputs[0].token_ids == slow_ids(table, prompt, ordinary)
        assert output.error is None


def test_text_for_bad_words_needs_a_tokenizer(options: dict[str, Any], drained: Drained) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        drained(**options).generate([1, 2], SamplingParams(bad_words=["no"]))


def test_bad_words_as_text() -> None:
    """Of the embedded model: banned at the start of a line and after a space, whatever else is sampled."""
    llm = LLM(device="cpu")
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    text = llm.generate("Once upon a time", plain)[0].outputs[0].text
    word = text.split()[1]
    banned = SamplingParams(temperature=0.0, max_tokens=12, bad_words=[word])
    without = llm.generate("Once upon a time", banned)[0].outputs[0].text
    assert word in text.split()
    assert word not in without.split()


# ---- E-02: penalties and minimum length count tokens, not steps


def constant_llm(row: dict[int, float], num_drafts: int, directory: Path, drained: Drained) -> LLM:
    """Every position has the logits `row`, and -10 for the other ids."""
    logits = torch.tensor([row.get(i, -10.0) for i in range(10)])
    plugin = ToyPlugin(lambda keys, positions: logits.expand(len(keys), -1))
    model = save_toy(directory, 10, eos_token_id=3)
    return drained(model, plugins=[plugin], device="cpu", block_size=4, num_draft_tokens=num_drafts)


@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_penalties_count_tokens(num_drafts: int, tmp_path: Path, drained: Drained) -> None:
    llm = constant_llm({0: 2.0, 1: 1.0, 2: 0.0}, num_drafts, tmp_path, drained)
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    # The prompt holds the best id; frequency and presence look at the output alone.
    (output,) = llm.generate([0, 7], SamplingParams(frequency_penalty=0.3, **greedy))
    assert output.outputs[0].token_ids == ["ABC".index(c) for c in "A A A A B A B A B A B C A B C A".split()]
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, **greedy)
    expected: list[int] = []
    for _ in range(16):
        adjusted = adjusted_logits([2.0, 1.0, 0.0, *[-10.0] * 7], params, [7, 7], expected)
        assert sorted(adjusted)[-1] - sorted(adjusted)[-2] > 1e-4
        expected.append(adjusted.index(max(adjusted)))
    assert llm.generate([7, 7], params)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_minimum_length_counts_tokens(
    ignore_eos: bool, num_drafts: int, tmp_path: Path, drained: Drained
) -> None:
    """The end id is the best one throughout, so its first index is the minimum length."""
    llm = constant_llm({0: 2.0, 1: 1.0, 2: 0.0, 3: 3.0}, num_drafts, tmp_path, drained)
    params = SamplingParams(temperature=0.0, min_tokens=6, max_tokens=10, ignore_eos=ignore_eos)
    plain = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=ignore_eos)
    outputs = llm.generate([[5, 6, 7, 8, 9], [3, 3], [1, 2]], [params, params, plain])
    first = [output.outputs[0].token_ids.index(3) for output in outputs]
    assert first == [6, 6, 0]
    reasons = {"length"} if ignore_eos else {"stop"}
    assert {output.outputs[0].finish_reason for output in outputs} == reasons


# ---- the same ids whatever happens to the request

PROMPTS = [[7, 3, 11, 20, 6], [1, 2, 3, 4, 1, 2, 9, 9, 12], [5] * 6, [30, 29]]
EVERYTHING = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "logit_bias": {EOS: 3.0, 4: 1.0, 8: -1.0},
    "bad_words": [[4], [7, 9], [1, 2, 3], [12, 12]],
    "min_tokens": 9,
    "max_tokens": 14,
}
PARAMS = [
    SamplingParams(temperature=0.0, **EVERYTHING),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, **EVERYTHING),
    SamplingParams(temperature=0.8, seed=6, frequency_penalty=1.0, max_tokens=14, ignore_eos=True),
    SamplingParams(
        temperature=1.0,
        seed=7,
        allowed_token_ids=range(3, 25),
        bad_words=[[5, 6], [6, 5], [20]],
        max_tokens=14,
    ),
]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 3},
        {"num_blocks": 12},
        {"num_blocks": 12, "async_scheduling": False},
        {"num_blocks": 12, "max_num_batched_tokens": 5, "enable_prefix_caching": False},
        {"max_num_reqs": 1},
    ],
    ids=lambda setting: ", ".join(f"{name}={value}" for name, value in setting.items()) or "default",
)
def test_every_way_of_running_gives_the_same_ids(
    setting: dict[str, Any], options: dict[str, Any], table: ToyTable, drained: Drained
) -> None:
    """Chunks, preemption and resume, prefix hits (the second round), company: all equal to the slow sampler."""
    llm = drained(**options, **setting)
    expected = [slow_ids(table, p, q, [EOS]) for p, q in zip(PROMPTS, PARAMS, strict=True)]
    for turn in range(2):
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == expected, f"round {turn}"
    assert (llm.stats().preemptions > 0) == ("num_blocks" in setting)
    assert (llm.stats().cached_tokens > 0) == setting.get("enable_prefix_caching", True)
    slots = [PARAMS[0]] * 4 + [SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)] * 4
    outputs = llm.generate(PROMPTS * 2, slots)
    wanted = [slow_ids(table, p, q, [EOS]) for p, q in zip(PROMPTS * 2, slots, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == wanted, "slots that change hands"


def test_min_tokens_beyond_the_room_is_refused(toy_options, drained) -> None:
    llm = drained(**toy_options, max_model_len=32)
    with pytest.raises(RequestError, match=r"min_tokens=20 .* max_model_len=32"):
        llm.generate([[5] * 28], SamplingParams(max_tokens=None, min_tokens=20))
