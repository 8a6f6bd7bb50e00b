"""Compiling beside the loop: who waits, who does not, what is kept, and how failures end."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from forms import FORMS
from support.drained import Drained

from core_runner import LLM, SamplingParams, StructuredOutput
from core_runner.request import Request
from core_runner.structured.grammars import GrammarConstraint, Grammars
from core_runner.structured.library import GrammarError, grammar_of

PROMPT = [5, 6, 7, 8]
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_reqs": 2, "max_model_len": 128, "num_blocks": 33}
FREE = SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)


class Slow:
    """A request whose grammar is compiled when the test says so."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm, self.form = llm, StructuredOutput(regex="[a-f]{4}")
        params = SamplingParams(temperature=1.0, seed=2, max_tokens=30, structured_output=self.form)
        self.request = Request(name, PROMPT, params)
        self.compiled: Future[Any] = Future()
        self.request.constraint = GrammarConstraint(self.compiled)
        llm.engine.add_request(self.request)

    def compile(self) -> None:
        # The manager's own, which it shares between requests.
        ready = self.llm.engine.grammars.constrain(self.form)
        self.compiled.set_result(ready._compiled.result())


def _run(llm: LLM, until: Any) -> list[Any]:
    updates = []
    for _ in range(500):
        updates += llm.engine.step()
        if until():
            return updates
    raise AssertionError("no end in sight")


@pytest.mark.parametrize("is_async", [False, True])
def test_waiting_for_a_grammar_holds_up_nobody(is_async: bool, drained: Drained) -> None:
    llm = drained(**OPTIONS, async_scheduling=is_async)
    want = llm.generate([PROMPT], FREE)[0].outputs[0].token_ids
    slow = Slow(llm, "slow")
    others = [Request(f"free {i}", PROMPT, FREE) for i in range(3)]
    for other in others:
        llm.engine.add_request(other)
    _run(llm, lambda: all(other.is_finished for other in others))
    assert [other.output_token_ids for other in others] == [want] * 3
    assert (llm.stats().waiting, slow.request.output_token_ids) == (1, [])
    assert llm.engine.step() == []
    slow.compile()
    _run(llm, lambda: slow.request.is_finished)
    text = llm.tokenizer.decode(slow.request.output_token_ids, skip_special_tokens=True)
    assert len(text) == 4
    assert set(text) <= set("abcdef")
    llm.engine.settle()


def test_a_request_that_became_ready_has_its_place_in_the_line(drained: Drained) -> None:
    llm = drained(**{**OPTIONS, "max_num_reqs": 1})
    slow = Slow(llm, "slow")
    others = [Request(f"free {i}", PROMPT, FREE) for i in range(2)]
    for other in others:
        llm.engine.add_request(other)
    llm.engine.step()
    slow.compile()
    _run(llm, lambda: slow.request.is_finished)
    assert others[0].is_finished
    assert not others[1].is_finished
    _run(llm, lambda: others[1].is_finished)
    llm.engine.settle()


def test_a_grammar_that_cannot_be_compiled_ends_its_request(drained: Drained) -> None:
    llm = drained(**OPTIONS)
    slow = Slow(llm, "slow")
    other = Request("free", PROMPT, FREE)
    llm.engine.add_request(other)
    llm.engine.step()
    slow.compiled.set_exception(GrammarError("too many states"))
    updates = _run(llm, lambda: other.is_finished)
    assert [(u.request, u.finish_reason) for u in updates if u.request is slow.request] == [
        (slow.request, "error")
    ]
    assert slow.request.error == "structured output: too many states"
    assert len(other.output_token_ids) == 5
    llm.engine.settle()


def test_aborted_while_compiling(drained: Drained) -> None:
    llm = drained(**OPTIONS)
    slow = Slow(llm, "slow")
    llm.engine.step()
    assert llm.engine.abort("slow")
    assert not llm.engine.has_unfinished
    slow.compile()
    assert llm.engine.step() == []


def test_a_failure_of_compiling_reaches_the_caller_with_its_reason(
    drained: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drained(**OPTIONS)
    # Sound as such, but it names an id that this vocabulary has not: that shows only when it is compiled.
    beyond = SamplingParams(structured_output=StructuredOutput(grammar="start: <[70000]>"))
    good = SamplingParams(temperature=1.0, seed=1, structured_output=FORMS["choice"][0])
    for _ in range(2):
        bad, fine = llm.generate([PROMPT, PROMPT], [beyond, good])
        assert bad.outputs[0].finish_reason == "error"
        assert "70000" in bad.error
        assert FORMS["choice"][1](fine.outputs[0].text)


def test_grammars_are_compiled_once_while_they_are_kept() -> None:
    llm = LLM(**OPTIONS)
    grammars = Grammars(llm.tokenizer, 2048, [2], max_cached=2)
    forms = [StructuredOutput(regex=f"a{{{n}}}") for n in (1, 2, 3)]
    first = grammars.constrain(forms[0])
    assert grammars.constrain(StructuredOutput(regex="a{1}"))._compiled is first._compiled
    grammars.constrain(forms[1])
    assert grammars.constrain(forms[0])._compiled is first._compiled, "the one used last is kept"
    grammars.constrain(forms[2])
    assert grammars.constrain(forms[0])._compiled is first._compiled
    assert grammars.constrain(forms[1])._compiled is not first._compiled
    assert len(grammars._cache) == 2


def test_tokens_that_a_grammar_forbids_end_the_constraint_with_a_reason() -> None:
    llm = LLM(**OPTIONS)
    constraint = llm.engine.grammars.constrain(FORMS["choice"][0])
    constraint._compiled.result()
    assert constraint.is_ready()
    yes, other = (llm.tokenizer.encode_prompt(text) for text in ("yes", "?"))
    assert constraint.accept(yes)
    assert not constraint.accept(other)
    assert f"token {other[0]} was sampled" in constraint.error


def test_a_matcher_that_broke_allows_nothing() -> None:
    """The library would let it end, so that half a text passes for a whole one."""
    llm = LLM(**OPTIONS)
    grammars = llm.engine.grammars
    requests = [
        Request(f"r{i}", PROMPT, SamplingParams(structured_output=FORMS["choice"][0])) for i in range(2)
    ]
    for request in requests:
        request.constraint = grammars.constrain(FORMS["choice"][0])
        request.constraint._compiled.result()
        assert request.constraint.is_ready()
    requests[0].constraint.matcher.consume_token(0)
    words = grammars.fill(requests)
    assert not words[0].any()
    assert words[1].any()
    assert requests[0].constraint.error.startswith("structured output: ")
    assert requests[1].constraint.error is None


def test_ids_past_the_tokenizer_are_never_allowed() -> None:
    llm = LLM(**OPTIONS)
    size = len(llm.tokenizer)
    for vocab_size in (size + 70, size, size - 100):
        grammars = Grammars(llm.tokenizer, vocab_size, [2])
        form = StructuredOutput(regex=r"(.|\n)*")
        requests = [Request(f"r{i}", PROMPT, SamplingParams(structured_output=form)) for i in range(2)]
        for request in requests:
            request.constraint = grammars.constrain(form)
            request.constraint._compiled.result()
            assert request.constraint.is_ready()
        words = grammars.fill(requests)
        assert words.shape == (2, -(-vocab_size // 32))
        allowed = [i for i in range(32 * words.shape[1]) if int(words[0, i // 32]) >> (i % 32) & 1]
        assert len(allowed) > 1000
        assert max(allowed) < size


def test_no_end_id_and_no_fast_tokenizer_are_refused() -> None:
    llm = LLM(**OPTIONS)
    params = SamplingParams(structured_output=StructuredOutput(regex="a"))
    grammars = Grammars(llm.tokenizer, 2, [])
    with pytest.raises(Exception, match="needs an end id"):
        grammars.check(params)

    class Slow:
        eos_token_id, name, hf = 2, "slow one", object()

    with pytest.raises(GrammarError, match="needs a fast tokenizer, which 'slow one' is not"):
        Grammars(Slow(), 2048, []).check(params)


def test_whitespace_in_json_is_bounded() -> None:
    llm = LLM(**OPTIONS)
    matcher = llm.engine.grammars.constrain(StructuredOutput(json={"type": "array", "items": {"const": 1}}))
    proto = matcher._compiled.result()
    for text, want in {
        "[1,1]": True,
        "[1, 1]": True,
        "[\n  1,\n  1\n]": True,
        "[" + " " * 40 + "1]": False,
    }.items():
        copy = proto.deep_copy()
        ids = llm.tokenizer.encode_prompt(text)
        assert (copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()) == want, text


def test_checking_needs_no_vocabulary() -> None:
    assert grammar_of(FORMS["schema"][0])
    with pytest.raises(GrammarError, match="unclosed"):
        grammar_of(StructuredOutput(regex="[a"))
