"""Programs without an engine: the order in which they go on, and what an error or a close takes with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from core_runner.errors import RequestError
from core_runner.programs import ProgramEnd, Programs
from model_states.tasks import Program, TaskRequest


class ScriptedHost:
    """Starts nothing; a test delivers by hand. A request for token 0 is refused."""

    def __init__(self) -> None:
        self.open: dict[int, Any] = {}
        self.soon: list[bool] = []
        self.cancelled: list[Any] = []

    def start_request(self, ticket: int, request: TaskRequest, *, soon: bool) -> None:
        if 0 in request.prompt_token_ids:
            raise RequestError("token 0 is refused")
        self.open[ticket] = request.prompt_token_ids[0]
        self.soon.append(soon)

    def start_work(self, ticket: int, function: Callable[[], Any]) -> None:
        self.open[ticket] = function

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(self.open.pop(ticket))

    def ticket(self, value: Any) -> int:
        return next(ticket for ticket, waited in self.open.items() if waited == value)


def ask(token: int) -> TaskRequest:
    return TaskRequest([token], {})


class Stage:
    """Programs under test; `say` answers the request for a token with ten times the token."""

    def __init__(self) -> None:
        self.host = ScriptedHost()
        self.programs = Programs(self.host)
        self.ends: list[ProgramEnd] = []

    def start(self, *programs: Program) -> None:
        for index, program in enumerate(programs):
            self.programs.add(index, program)
        self.ends += self.programs.advance()

    def say(self, *tokens: int) -> None:
        for token in tokens:
            ticket = self.host.ticket(token)
            del self.host.open[ticket]
            self.programs.deliver(ticket, 10 * token)
        self.ends += self.programs.advance()


@pytest.fixture
def stage() -> Stage:
    return Stage()


def summed(*tokens: int) -> Program:
    """The sum of what requests for the tokens bring."""
    return sum((yield [ask(token) for token in tokens]))


def test_results_come_in_the_order_of_the_group_whatever_came_first(stage: Stage) -> None:
    def program() -> Program:
        return (yield [ask(1), summed(2, 3), ask(4)])

    stage.start(program())
    assert sorted(stage.host.open.values()) == [1, 2, 3, 4]
    stage.say(4, 3)
    stage.say(1)
    assert stage.ends == []
    stage.say(2)
    assert stage.ends == [ProgramEnd(0, [10, 50, 40])]
    assert len(stage.programs) == 0


def test_programs_go_on_without_each_other(stage: Stage) -> None:
    def two_steps(token: int) -> Program:
        (first,) = yield [ask(token)]
        (second,) = yield [ask(token + 1)]
        return first, second

    stage.start(two_steps(1), two_steps(5))
    stage.say(5)
    stage.say(6)
    assert stage.ends == [ProgramEnd(1, (50, 60))]
    stage.say(1)
    stage.say(2)
    assert stage.ends[1:] == [ProgramEnd(0, (10, 20))]
    assert stage.host.soon == [False, False, True, True], "who has begun comes before who has not"


def test_an_empty_group_and_deep_nesting(stage: Stage) -> None:
    def nested(depth: int) -> Program:
        assert (yield []) == []
        if depth == 0:
            return (yield [ask(7)])[0]
        return (yield [nested(depth - 1)])[0] + 1

    # Deeper than Python's stack would allow one frame a level.
    stage.start(nested(3000))
    stage.say(7)
    assert stage.ends == [ProgramEnd(0, 3070)]
    stage.start(nested(3000))
    stage.programs.close()
    assert stage.host.cancelled == [7]


def test_a_program_that_waits_for_nothing_ends_at_once(stage: Stage) -> None:
    def program() -> Program:
        return 3
        yield

    stage.start(program())
    assert stage.ends == [ProgramEnd(0, 3)]


def test_an_error_of_the_body_ends_its_program_alone(stage: Stage) -> None:
    def fails() -> Program:
        yield [ask(1)]
        raise KeyError("mine")

    stage.start(fails(), summed(2))
    stage.say(1)
    (end,) = stage.ends
    assert end.index == 0
    assert isinstance(end.error, KeyError)
    stage.say(2)
    assert stage.ends[1:] == [ProgramEnd(1, 20)]


def test_an_error_is_raised_in_the_parent_and_its_other_children_are_given_up(stage: Stage) -> None:
    closed: list[str] = []

    def waits(name: str, token: int) -> Program:
        try:
            yield [ask(token)]
        finally:
            closed.append(name)

    def fails() -> Program:
        yield [ask(1)]
        raise ValueError("the child's")

    def parent() -> Program:
        try:
            yield [waits("a", 2), fails(), ask(3)]
        except ValueError as error:
            return str(error), (yield [ask(4)])[0]

    stage.start(parent(), summed(5))
    stage.say(1)
    assert closed == ["a"]
    assert sorted(stage.host.cancelled) == [2, 3]
    stage.say(4)
    assert stage.ends == [ProgramEnd(0, ("the child's", 40))]
    stage.say(5)
    assert stage.ends[1:] == [ProgramEnd(1, 50)]


def test_a_refused_request_is_raised_where_it_was_yielded(stage: Stage) -> None:
    def catches() -> Program:
        try:
            yield [ask(1), ask(0), ask(2)]
        except RequestError:
            return "refused"

    def does_not() -> Program:
        yield [summed(3), summed(0)]

    stage.start(catches(), does_not())
    assert stage.ends[0] == ProgramEnd(0, "refused")
    assert isinstance(stage.ends[1].error, RequestError)
    assert sorted(stage.host.cancelled) == [1, 3]
    assert not stage.host.open


@pytest.mark.parametrize("group", [[3], ["text"], [None], 5])
def test_what_cannot_be_waited_for_is_an_error(group: Any, stage: Stage) -> None:
    def program() -> Program:
        yield group

    stage.start(program())
    assert isinstance(stage.ends[0].error, TypeError)


def test_two_errors_of_one_group_are_raised_once(stage: Stage) -> None:
    def fails(token: int) -> Program:
        yield [ask(token)]
        raise ValueError(token)

    def parent() -> Program:
        try:
            yield [fails(1), fails(2)]
        except ValueError as error:
            return error.args

    stage.start(parent())
    for token in (1, 2):  # both go on in the same round
        ticket = stage.host.ticket(token)
        stage.programs.deliver(ticket, None)
    assert stage.programs.advance() == [ProgramEnd(0, (1,))]


def test_close_cancels_everything_and_closes_the_generators(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[int] = []

    def waits(token: int) -> Program:
        try:
            yield [ask(token)]
        finally:
            closed.append(token)

    def stubborn() -> Program:
        try:
            yield [waits(3)]
        finally:
            raise OSError("while it was closed")

    def parent() -> Program:
        yield [waits(1), waits(2), ask(4)]

    stage.start(parent(), stubborn(), waits(5))
    with caplog.at_level(logging.WARNING):
        stage.programs.close()
    assert sorted(closed) == [1, 2, 3, 5]
    assert not stage.host.open
    assert len(stage.programs) == 0
    assert "failed while it was closed" in caplog.text
    stage.programs.deliver(1, "too late")
    assert stage.programs.advance() == []


def test_a_failed_ticket_is_raised_and_its_neighbours_cancelled(stage: Stage) -> None:
    stage.start(summed(1, 2))
    stage.programs.fail(stage.host.ticket(1), OSError("gone"))
    (end,) = stage.programs.advance()
    assert isinstance(end.error, OSError)
    assert stage.host.cancelled == [2]
