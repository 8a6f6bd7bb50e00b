"""A request is looked at once by the engine that serves it, and again by any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.drained import Drained

from core_runner import LLM, RequestError, SamplingParams
from core_runner.request import Request
from core_runner.scheduling.admission import AdmissionRules

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def _count_checks(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    seen: list[Request] = []
    check = AdmissionRules.max_total_len

    def counting(rules: AdmissionRules, request: Request) -> int:
        seen.append(request)
        return check(rules, request)

    monkeypatch.setattr(AdmissionRules, "max_total_len", counting)
    return seen


def test_each_request_is_checked_once(
    toy_options: dict[str, Any], drained: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drained(**toy_options)
    seen = _count_checks(monkeypatch)
    llm.generate([[5, 6], [7], [8, 9]], GREEDY)
    assert len(seen) == len(set(map(id, seen))) == 3


def test_another_engine_checks_again(toy_options: dict[str, Any], drained: Drained) -> None:
    roomy: LLM = drained(**toy_options)
    narrow: LLM = drained(**{**toy_options, "max_model_len": 8})
    request = Request("long", list(range(1, 13)), GREEDY)
    roomy.engine.validate(request)
    with pytest.raises(RequestError, match="max_model_len=8"):
        narrow.engine.add_request(request)
    assert not narrow.engine.has_unfinished
    roomy.engine.add_request(request)
    roomy.engine.abort_all()


def test_an_engine_that_began_again_checks_again(
    toy_options: dict[str, Any], drained: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drained(**toy_options)
    request = Request("kept", [5, 6, 7], GREEDY)
    llm.engine.validate(request)
    llm.engine._start_over()
    seen = _count_checks(monkeypatch)
    llm.engine.add_request(request)
    assert seen == [request]
    llm.engine.abort_all()


def test_an_approved_request_is_added_once(toy_options: dict[str, Any], drained: Drained) -> None:
    llm = drained(**toy_options)
    request = Request("twice", [5, 6, 7], GREEDY)
    llm.engine.validate(request)
    llm.engine.add_request(request)
    with pytest.raises(RequestError, match="was added before"):
        llm.engine.add_request(request)
    llm.engine.abort_all()


@pytest.mark.parametrize(
    ("token_ids", "says"),
    [
        ([1, -2, 3], "prompt token id -2 is outside"),
        ([1, 2**31], f"prompt token id {2**31} is outside"),
        ([1, -(2**40)], f"prompt token id {-(2**40)} is outside"),
        ([1, 2**70], "flat sequence of integers"),
        ([1, 2.0], "not float64 of shape"),
        ([True, False], "not bool of shape"),
        ([[1, 2], [3, 4]], "of shape [2, 2]"),
        ([[1, 2], [3]], "flat sequence of integers"),
        (["1", "2"], "flat sequence of integers"),
        ([None, 1], "flat sequence of integers"),
    ],
)
def test_lists_that_are_no_prompts_are_refused_as_arrays_are(token_ids: Any, says: str) -> None:
    with pytest.raises(RequestError) as error:
        Request("bad", token_ids, GREEDY)
    assert says in str(error.value)
    assert "request 'bad'" in str(error.value)


@pytest.mark.parametrize("token_ids", [[0], [1, 0], [5, 7], [np.int64(9), 2], [2**31 - 1], (3, 4), range(3)])
def test_lists_become_the_arrays_that_numpy_makes(token_ids: Any) -> None:
    taken = Request("good", token_ids, GREEDY).prompt_token_ids
    assert taken.dtype == np.int32
    assert taken.tolist() == [int(i) for i in token_ids]
    assert taken.flags["C_CONTIGUOUS"]
