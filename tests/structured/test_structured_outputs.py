"""The embedded model under grammars: always valid, the same in every way of running, and no matter to others."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import pytest
from forms import FORMS
from support.drained import Drained
from support.phases import pushing_out

from core_runner import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutput

TEXT = "Once upon a time there was a small fox who lived near the river and asked everyone: "
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_reqs": 6, "max_model_len": 256, "num_blocks": 97}
NAMES = [name for name in FORMS for _ in range(2)]


def _params(name: str, seed: int, **changes: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seed": seed, "max_tokens": 80, "structured_output": FORMS[name][0]}
    return SamplingParams(**values | changes)


PARAMS = [_params(name, 10 + index) for index, name in enumerate(NAMES)]
FREE = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24) for seed in range(2)]


@lru_cache
def alone() -> list[list[int]]:
    """Tokens of each of PARAMS and FREE, by itself and one step at a time."""
    llm = LLM(**{**OPTIONS, "async_scheduling": False, "enable_prefix_caching": False})
    return [_tokens(llm.generate(TEXT, params)[0]) for params in [*PARAMS, *FREE]]


def _tokens(output: RequestOutput) -> list[int]:
    (completion,) = output.outputs
    return completion.token_ids


def _check_valid(outputs: list[RequestOutput], names: list[str]) -> None:
    for name, output in zip(names, outputs, strict=True):
        (completion,) = output.outputs
        assert (completion.finish_reason, output.error) == ("stop", None), (name, completion)
        assert FORMS[name][1](completion.text), (name, completion.text)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_reqs": 3},
        {"num_blocks": 9, "max_num_reqs": 4, "enable_prefix_caching": False},
        {"num_blocks": 9, "max_num_reqs": 4, "async_scheduling": False},
    ],
    ids=["async", "chunks", "preempted", "preempted sync"],
)
def test_same_tokens_however_they_run(changes: dict[str, Any], drained: Drained) -> None:
    llm = drained(**{**OPTIONS, **changes})
    order = [FREE[0], *PARAMS, FREE[1]]
    outputs = llm.generate([TEXT] * len(order), order)
    want = alone()
    assert [_tokens(o) for o in outputs[1:-1]] == want[: len(PARAMS)]
    assert [_tokens(outputs[0]), _tokens(outputs[-1])] == want[len(PARAMS) :], "neighbours are disturbed"
    _check_valid(outputs[1:-1], NAMES)
    assert (llm.stats().preemptions > 0) == ("num_blocks" in changes)


def test_resumed_requests_go_on_in_their_grammar(drained: Drained) -> None:
    llm = drained(**OPTIONS)
    chosen = [i for i, name in enumerate(NAMES) if name in ("schema", "regex")]
    length = len(llm.tokenizer.encode_prompt(TEXT)) + 4
    with pushing_out(llm.engine, length) as pushed_out:
        outputs = llm.generate([TEXT] * len(chosen), [PARAMS[i] for i in chosen])
    assert len(pushed_out) == len(chosen)
    assert [_tokens(o) for o in outputs] == [alone()[i] for i in chosen]


def test_several_completions_and_options_beside(drained: Drained) -> None:
    llm = drained(**OPTIONS)
    params = _params(
        "regex", 3, n=3, logprobs=2, top_p=0.95, top_k=200, repetition_penalty=1.3, stop_token_ids=[0, 40]
    )
    (output,) = llm.generate(TEXT, params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        assert FORMS["regex"][1](completion.text)
        assert len(completion.logprobs) == len(completion.token_ids)


def test_raw_logprobs_are_the_models_and_processed_ones_the_grammars(drained: Drained) -> None:
    llm = drained(**OPTIONS)
    raw, processed = (
        llm.generate(TEXT, _params("choice", 1, logprobs=5, logprobs_mode=mode))[0].outputs[0]
        for mode in ("raw", "processed")
    )
    assert raw.token_ids == processed.token_ids
    first = processed.logprobs[0]
    allowed = [entry.logprob for entry in first.values() if entry.logprob > -1e30]
    assert sum(2.718281828**value for value in allowed) == pytest.approx(1, abs=1e-3)
    assert max(entry.logprob for entry in raw.logprobs[0].values()) < -1e-3


def test_own_stop_ids_end_a_text_only_where_it_may_end(drained: Drained) -> None:
    """A stop id that the grammar does not know is allowed when the text is whole, and never before."""
    llm = drained(**OPTIONS)
    stop = llm.tokenizer.encode_prompt("~")[0]
    params = _params(
        "gbnf",
        5,
        stop_token_ids=[stop],
        logit_bias={stop: 100.0},
        structured_output=StructuredOutput(grammar='root ::= "abc"\n'),
    )
    (output,) = llm.generate(TEXT, params)
    (completion,) = output.outputs
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop
    assert llm.tokenizer.decode(completion.token_ids[:-1]) == "abc"


def test_a_limit_cuts_and_says_so(drained: Drained) -> None:
    llm = drained(**OPTIONS)
    (output,) = llm.generate(TEXT, _params("schema", 1, max_tokens=3))
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammar_and_bias_that_leave_nothing_end_with_an_error(temperature: float, drained: Drained) -> None:
    """Field report A-03 (e): alone and among others."""
    llm = drained(**OPTIONS)
    only_seven = StructuredOutput(grammar="start: <[7]> <[8]>")
    params = _params(
        "choice", 1, temperature=temperature, structured_output=only_seven, logit_bias={7: -float("inf")}
    )
    late = _params(
        "choice", 1, temperature=temperature, structured_output=only_seven, logit_bias={8: -float("inf")}
    )
    for company in ([], [*FREE, *PARAMS[:5]]):
        first, second, *others = llm.generate([TEXT] * (2 + len(company)), [params, late, *company])
        assert _tokens(first) == []
        assert _tokens(second) == [7], "an id that is legal is kept, and no other follows"
        for output in (first, second):
            assert output.outputs[0].finish_reason == "error"
            assert "structured_output" in output.error
            assert "logit_bias" in output.error
        want = alone()
        assert [_tokens(o) for o in others] == [*want[len(PARAMS) :], *want[:5]][: len(company)]


def test_a_grammar_that_breaks_on_the_way_ends_its_request_alone(drained: Drained) -> None:
    """Half a text never passes for a whole one."""
    llm = drained(**OPTIONS)
    endless = _params("choice", 1, structured_output=StructuredOutput(grammar='start: "x" start'))
    broken, other = llm.generate([TEXT] * 2, [endless, PARAMS[0]])
    assert broken.outputs[0].finish_reason == "error"
    assert broken.error.startswith("structured output: parser error: Too many items")
    assert set(broken.outputs[0].text) <= {"x"}
    assert _tokens(other) == alone()[0]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": "[a-z"}, "unclosed character class"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"json": {"type": "strin"}}, "Invalid type"),
        (
            {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
            "minimum (5) is greater than maximum (3)",
        ),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/$defs/nowhere"}}, "nowhere"),
        ({"grammar": "start: nowhere"}, "unknown name"),
        ({"grammar": "root ::= (\n"}, "no GBNF"),
    ],
)
def test_bad_grammars_are_refused_before_anything_starts(form: dict[str, Any], reason: str, llm: LLM) -> None:
    steps = llm.stats().steps
    params = SamplingParams(structured_output=form)
    with pytest.raises(RequestError, match=f"request .*structured_output.{next(iter(form))} is ") as refused:
        llm.generate([TEXT, TEXT], [PARAMS[0], params])
    assert reason in str(refused.value)
    assert llm.stats().steps == steps
    good, bad = llm.generate([TEXT] * 2, [PARAMS[2], params], on_bad_prompt="return")
    assert _tokens(good) == alone()[2]
    assert bad.outputs[0].finish_reason == "error"
    assert reason in bad.error


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**OPTIONS)


def test_a_missing_library_is_named_with_the_way_to_get_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    params = SamplingParams(structured_output={"regex": "never seen before"})
    with pytest.raises(RequestError, match=r"llguidance.*pip install 'core-runner\[structured\]'"):
        llm.generate(TEXT, params)
