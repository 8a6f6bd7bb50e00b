"""Programs over an engine: requests of many programs in one batch, and nothing left behind however they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
from support.drained import Drained
from support.toy_model import ToyPlugin, ToyTable, save_toy

from core_runner import LLM, RequestError, SamplingParams
from core_runner.programs import ProgramEnd
from model_states.tasks import Program, TaskOutput, TaskRequest

GREEDY = {"temperature": 0.0, "ignore_eos": True}
TABLE = ToyTable(50, seed=3)


@pytest.fixture
def llm(tmp_path: Any, drained: Drained) -> LLM:
    return drained(
        save_toy(tmp_path, 50), plugins=[ToyPlugin(TABLE)], device="cpu", block_size=4, max_num_reqs=4
    )


def ask(prompt: list[int], max_tokens: int = 4, **params: Any) -> TaskRequest:
    return TaskRequest(prompt, {**GREEDY, "max_tokens": max_tokens, **params})


def chained(prompt: list[int], links: int) -> Program:
    """Each request goes on from what the one before gave."""
    for _ in range(links):
        (output,) = yield [ask(prompt)]
        prompt = [*prompt, *output.token_ids]
    return prompt


def results(ends: Iterator[ProgramEnd]) -> list[Any]:
    ordered = sorted(ends, key=lambda end: end.index)
    assert [end.error for end in ordered] == [None] * len(ordered)
    return [end.result for end in ordered]


def expected(prompt: list[int], links: int) -> list[int]:
    return [*prompt, *TABLE.greedy(prompt, 4 * links)]


def test_many_programs_share_the_steps(llm: LLM) -> None:
    prompts = [[1 + n, 7] for n in range(30)]

    def pair(one: list[int], other: list[int]) -> Program:
        return (yield [chained(one, 2), chained(other, 3)])

    programs = [pair(*two) for two in zip(prompts[::2], prompts[1::2], strict=True)]
    steps = llm.stats().steps
    assert results(llm.run(programs)) == [
        [expected(one, 2), expected(other, 3)] for one, other in zip(prompts[::2], prompts[1::2], strict=True)
    ]
    alone = 4 * sum(2 + 3 for _ in programs)
    assert llm.stats().steps - steps < alone / 2.5


def test_outputs_say_how_they_ended_and_how_likely_they_were(llm: LLM) -> None:
    reference = TABLE.reference([5, 6], 4)

    def program() -> Program:
        stop = reference.token_ids[2]
        return (yield [ask([5, 6], logprobs=0), ask([5, 6], stop_token_ids=[stop])])

    ((long, stopped),) = results(llm.run([program()]))
    assert isinstance(long, TaskOutput)
    assert long.token_ids == reference.token_ids
    assert long.finish_reason == "length"
    want = [float(row[token]) for row, token in zip(reference.logprobs, reference.token_ids, strict=True)]
    assert long.logprobs == pytest.approx(want, abs=1e-5)
    assert stopped.token_ids == reference.token_ids[:3]
    assert stopped.finish_reason == "stop"
    assert list(stopped.logprobs) == []


def test_a_row_that_fails_is_an_output(tmp_path: Any, drained: Drained) -> None:
    llm = drained(save_toy(tmp_path, 50), plugins=[ToyPlugin(TABLE)], device="cpu", block_size=4)

    def program() -> Program:
        failed = TaskRequest([5, 6], {**GREEDY, "max_tokens": 2}, {"stale": True})
        return (yield [failed, ask([5, 6], 2)])

    ((failed, good),) = results(llm.run([program()]))
    assert failed.finish_reason == "error"
    assert "NaN" in failed.error
    assert good.token_ids == TABLE.greedy([5, 6], 2)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask([50]), "outside the vocabulary"),
        (ask([]), "empty"),
        (ask([5], 0), "max_tokens=0"),
        (ask([5], n=2), "yield several requests"),
        (ask([5], no_such=1), "no_such"),
        (ask([5], stop=["x"]), "tokenizer"),
    ],
)
def test_a_bad_request_ends_its_program_alone(request_: TaskRequest, message: str, llm: LLM) -> None:
    def bad() -> Program:
        yield [chained([9], 3), request_]

    ends = sorted(llm.run([chained([5, 6], 2), bad(), chained([7, 8], 2)]), key=lambda end: end.index)
    assert isinstance(ends[1].error, RequestError)
    assert message in str(ends[1].error)
    assert [ends[0].result, ends[2].result] == [expected([5, 6], 2), expected([7, 8], 2)]


def test_an_exception_of_a_body_ends_its_program_alone_and_frees_its_requests(llm: LLM) -> None:
    def fails() -> Program:
        yield [ask([5], 1)]
        raise KeyError("mine")

    def parent() -> Program:
        yield [fails(), ask([6], 200)]

    ends = {end.index: end for end in llm.run([parent(), chained([7, 8], 2)])}
    assert isinstance(ends[0].error, KeyError)
    assert ends[1].result == expected([7, 8], 2)
    assert llm.stats().running == llm.stats().waiting == 0


def test_programs_are_begun_as_there_is_room(llm: LLM) -> None:
    begun: list[int] = []
    most = 0

    def program(number: int) -> Program:
        begun.append(number)
        yield [ask([1 + number])]
        return number

    for count, _ in enumerate(llm.run(program(number) for number in range(40))):
        most = max(most, len(begun) - count)
    assert len(begun) == 40
    assert most <= 4 + 4 + 4, "slots, the queue, and those that had ended unseen"


def test_requests_of_a_program_that_goes_on_come_before_those_that_only_begin(llm: LLM) -> None:
    order: list[int] = []

    def one(number: int) -> Program:
        yield [ask([1 + number])]
        yield [ask([1 + number])]
        order.append(number)

    def many() -> Program:
        yield [one(number) for number in range(40)]

    results(llm.run([many()]))
    places = [order.index(number) for number in range(40)]
    assert max(abs(place - number) for number, place in enumerate(places)) < 12


def test_closing_gives_everything_up(llm: LLM) -> None:
    closed: list[int] = []

    def program(number: int) -> Program:
        try:
            yield [ask([1 + number], 4 if number == 0 else 100), chained([1 + number], 2)]
            return number
        finally:
            closed.append(number)

    running = llm.run(program(number) for number in range(40))
    assert next(running).result == 0
    running.close()
    stats = llm.stats()
    assert stats.running == stats.waiting == 0
    assert 1 < len(closed) < 40
    assert results(llm.run([chained([5, 6], 2)])) == [expected([5, 6], 2)]


@pytest.mark.parametrize("where", ["step", "body", "on_advance"])
def test_ctrl_c_leaves_nothing_behind(where: str, llm: LLM) -> None:
    closed: list[int] = []
    steps = 0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def program(number: int) -> Program:
        try:
            yield [ask([1 + number], 3 + number)]
            if where == "body" and number == 1:
                interrupt()
            yield [ask([1 + number], 50)]
        finally:
            closed.append(number)

    def late() -> None:
        nonlocal steps
        steps += 1
        if where == "on_advance" and steps == 10:
            interrupt()

    execute = llm.engine.runner.execute_model

    def executing(*args: Any) -> Any:
        if where == "step" and llm.stats().steps > first + 8:
            interrupt()
        return execute(*args)

    first = llm.stats().steps
    with patch.object(llm.engine.runner, "execute_model", executing), pytest.raises(KeyboardInterrupt):
        list(llm.run([program(number) for number in range(3)], on_advance=late))
    assert sorted(closed) == [0, 1, 2]
    assert llm.stats().running == llm.stats().waiting == 0


def test_functions_run_beside_the_steps(llm: LLM) -> None:
    started, release = threading.Event(), threading.Event()

    def work() -> str:
        started.set()
        assert release.wait(10)
        return threading.current_thread().name

    def waits() -> Program:
        name, _ = yield [work, ask([5])]
        return name

    def releases() -> Program:
        tokens = yield [chained([5, 6], 3)]
        assert started.wait(10)
        release.set()
        return tokens[0]

    name, tokens = results(llm.run([waits(), releases()]))
    assert name.startswith("core-runner-task")
    assert tokens == expected([5, 6], 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("core-runner-task")]


def test_an_error_of_a_function_is_its_programs(llm: LLM) -> None:
    def work() -> None:
        raise OSError("no such file")

    def program() -> Program:
        yield [work, chained([5], 10)]

    ends = {end.index: end for end in llm.run([program(), chained([7, 8], 2)])}
    assert isinstance(ends[0].error, OSError)
    assert ends[1].result == expected([7, 8], 2)


def test_functions_that_wait_are_given_up_when_the_call_is_closed(llm: LLM) -> None:
    ran: list[int] = []

    def slow(number: int) -> Callable[[], None]:
        def work() -> None:
            ran.append(number)
            time.sleep(0.05)

        return work

    def program() -> Program:
        yield [slow(number) for number in range(100)]

    running = llm.run([chained([5, 6], 1), program()])
    assert next(running).index == 0
    running.close()
    assert len(ran) < 100


def test_what_the_source_of_programs_raises_ends_the_call(llm: LLM) -> None:
    def source() -> Iterator[Program]:
        yield chained([5], 3)
        raise OSError("the list ends here")

    with pytest.raises(OSError, match="ends here"):
        list(llm.run(source()))


def test_threads_share_an_engine(llm: LLM) -> None:
    def ask_both(number: int) -> Any:
        if number % 2:
            params = SamplingParams(max_tokens=8, **GREEDY)
            return llm.generate([[1 + number, 3]], params)[0].outputs[0].token_ids
        return results(llm.run([chained([1 + number, 3], 2), chained([1 + number, 4], 2)]))

    with ThreadPoolExecutor(6) as pool:
        for number, result in enumerate(pool.map(ask_both, range(24))):
            prompts = [[1 + number, 3], [1 + number, 4]]
            if number % 2:
                assert result == TABLE.greedy(prompts[0], 8)
            else:
                assert result == [expected(prompt, 2) for prompt in prompts]


def test_closing_the_engine_ends_the_programs_that_wait_for_it(llm: LLM) -> None:
    calls = 0

    def close_once() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            llm.close()

    ends = list(llm.run([chained([5, 6], 20), chained([7], 20)], on_advance=close_once))
    assert [type(end.error) for end in ends] == [RequestError] * 2
    assert "closed" in str(ends[0].error)
