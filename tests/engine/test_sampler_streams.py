"""A seeded request that uses every option at once gives one stream, alone or in any company, however it runs."""

from __future__ import annotations

import importlib
import random
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.drained import Drained
from support.phases import pushing_out

from core_runner import LLM, SamplingParams

if TYPE_CHECKING:
    from conftest import TinyModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "logits_processor"
_draw = random.Random(11)
PROMPT, *OTHERS = [[_draw.randrange(3, 211) for _ in range(n)] for n in (13, 1, 22, 6, 9)]
EVERYTHING: dict[str, Any] = {
    "temperature": 1.3,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "logit_bias": {PROMPT[0]: 1.5, 17: -2.0, 40: 0.5},
    "allowed_token_ids": [i for i in range(3, 211) if i % 9],
    "bad_words": [[20], [PROMPT[-1], 30], [31, 32, 33]],
    "min_tokens": 12,
    "stop_token_ids": [50],
    "logits_processors": {"no_repeat": {"window": 5}},
    "logprobs": 3,
    "max_tokens": 12,
    "ignore_eos": True,
}
SEEDED = SamplingParams(seed=99, logprobs_mode="processed", **EVERYTHING)
RAW = SamplingParams(seed=99, **EVERYTHING)
NEIGHBOURS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(seed=99, **{**EVERYTHING, "top_k": 3}),
    SamplingParams(temperature=0.8, max_tokens=14, ignore_eos=True, presence_penalty=1.0),
    SamplingParams(seed=1, logprobs_mode="processed", **{**EVERYTHING, "logits_processors": {}}),
]
COMPANIES = {"alone": (0, 0), "first": (0, 4), "last": (4, 0), "between": (2, 2)}
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "synchronous": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 5},
    "preempted": {},
    "preempted in chunks": {"max_num_batched_tokens": 7, "async_scheduling": False},
    "two at once": {"max_num_reqs": 2},
}


def serve(llm: LLM, company: str, params: SamplingParams) -> Any:
    before, after = COMPANIES[company]
    prompts = [*OTHERS[:before], PROMPT, *OTHERS[len(OTHERS) - after :]]
    neighbours = [*NEIGHBOURS[:before], params, *NEIGHBOURS[len(NEIGHBOURS) - after :]]
    return llm.generate(prompts, neighbours)[before].outputs[0]


@pytest.fixture
def make(llama: TinyModel, drained: Drained, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    extension = importlib.import_module("no_repeat").NoRepeatExtension

    def make_engine(**options: Any) -> LLM:
        options = {"device": "cpu", "block_size": 4, "max_num_reqs": 6, "max_model_len": 64, **options}
        return drained(llama.directory, extensions=[extension()], **options)

    return make_engine


def test_one_stream_whatever_runs_beside_it_and_however(make: Any) -> None:
    alone = serve(make(), "alone", SEEDED)
    assert len(alone.token_ids) == 12
    assert len(set(alone.token_ids)) > 6
    for engine, options in ENGINES.items():
        llm = make(**options)
        for company in COMPANIES:
            squeeze = pushing_out(llm.engine, 18) if "preempted" in engine else nullcontext([1])
            with squeeze as pushed_out:
                got = serve(llm, company, SEEDED)
            where = f"{engine}, {company}"
            assert pushed_out, where
            assert got.token_ids == alone.token_ids, where
            for ours, theirs in zip(got.logprobs, alone.logprobs, strict=True):
                assert {i: e.rank for i, e in ours.items()} == {i: e.rank for i, e in theirs.items()}, where
                assert [e.logprob for e in ours.values()] == pytest.approx(
                    [e.logprob for e in theirs.values()], abs=1e-4
                ), where


def test_asking_for_logprobs_changes_no_id(make: Any) -> None:
    llm = make()
    quiet = SamplingParams(seed=99, **{**EVERYTHING, "logprobs": None})
    streams = [serve(llm, "between", params).token_ids for params in (SEEDED, RAW, quiet)]
    assert streams == [streams[0]] * 3
