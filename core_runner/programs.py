"""`Programs`: generators that wait for requests, for functions and for each other; see `model_states.tasks`.

A tree: a program that yields other programs is their parent. An error in one is raised in its parent, after the rest of
what that waits for was given up; nobody outside the tree notices. No engine here: a `Host` starts what they wait for.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core_runner.errors import RequestError
from model_states.tasks import Program, TaskRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended. index: its place among those given. error: what ended it, where it has no result."""

    index: int
    result: Any = None
    error: Exception | None = None


class Host(Protocol):
    """Runs what programs wait for, and tells `Programs.deliver` or `Programs.fail` by the ticket."""

    def start_request(self, ticket: int, request: TaskRequest, *, soon: bool) -> None:
        """Raises `RequestError`, and changes nothing, for one that cannot be served.

        soon: its program has had results before, so it comes before those of programs that only begin.
        """

    def start_work(self, ticket: int, function: Callable[[], Any]) -> None:
        """Have a thread run the function."""

    def cancel(self, ticket: int) -> None:
        """Give up what was started; it is not asked for again."""


@dataclass(slots=True, eq=False)
class _Node:
    """One program. place: in its parent's group, or among those given. pending: by place in its own group."""

    program: Program
    parent: _Node | None
    place: int
    results: list[Any]
    pending: dict[int, int | _Node]
    has_begun: bool = False
    is_closed: bool = False


class Programs:
    """Programs on their way, each of which goes on as soon as all that it waits for is there."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._roots: dict[int, _Node] = {}
        self._tickets: dict[int, tuple[_Node, int]] = {}
        self._next_ticket = 0
        self._ready: deque[tuple[_Node, list[Any] | None, Exception | None]] = deque()
        self._ended: list[ProgramEnd] = []

    def __len__(self) -> int:
        """Programs given that have not ended."""
        return len(self._roots)

    def add(self, index: int, program: Program) -> None:
        """Have `advance` begin with a program."""
        self._roots[index] = node = self._begin(program, None, index)
        self._ready.append((node, None, None))

    def deliver(self, ticket: int, result: Any) -> None:
        """What a ticket stood for is there; nothing happens where nobody waits for it any more."""
        if ticket in self._tickets:
            self._settle(*self._tickets.pop(ticket), result)

    def fail(self, ticket: int, error: Exception) -> None:
        """What a ticket stood for will not come."""
        if ticket in self._tickets:
            node, place = self._tickets.pop(ticket)
            del node.pending[place]
            self._raise_in(node, error)

    def advance(self) -> list[ProgramEnd]:
        """Let everybody go on who can; gives the programs that have ended by that."""
        while self._ready:
            node, results, error = self._ready.popleft()
            if not node.is_closed:
                self._resume(node, results, error)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Give up everything: what runs is cancelled, and every generator closed."""
        for node in list(self._roots.values()):
            self._cancel_pending(node)
            self._close_program(node)
        self._roots.clear()
        self._ready.clear()

    def _begin(self, program: Program, parent: _Node | None, place: int) -> _Node:
        return _Node(program, parent, place, [], {})

    def _resume(self, node: _Node, results: list[Any] | None, error: Exception | None) -> None:
        program = node.program
        try:
            # A generator that has not begun takes None alone.
            group = program.send(results) if error is None else program.throw(error)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._end(node, stop.value, None)
        except Exception as problem:
            self._end(node, None, problem)
        else:
            self._start_group(node, group)

    def _start_group(self, node: _Node, group: Sequence[Any]) -> None:
        try:
            items = list(group)
            node.results = [None] * len(items)
            for place, item in enumerate(items):
                self._start(node, place, item)
            node.has_begun = True
        except Exception as error:
            self._raise_in(node, error)
        else:
            if not items:
                self._ready.append((node, [], None))

    def _start(self, node: _Node, place: int, item: Any) -> None:
        if isinstance(item, Generator):
            node.pending[place] = child = self._begin(item, node, place)
            self._ready.append((child, None, None))
            return
        if not isinstance(item, TaskRequest) and not callable(item):
            raise TypeError(f"a program yielded {item!r} in a group; yield requests, programs or functions")
        ticket = self._next_ticket = self._next_ticket + 1
        # Known here before the host knows it: then an interrupt in between leaves nothing behind.
        self._tickets[ticket], node.pending[place] = (node, place), ticket
        try:
            if isinstance(item, TaskRequest):
                self._host.start_request(ticket, item, soon=node.has_begun)
            else:
                self._host.start_work(ticket, item)
        except RequestError:
            del self._tickets[ticket], node.pending[place]
            raise

    def _end(self, node: _Node, result: Any, error: Exception | None) -> None:
        node.is_closed = True
        parent = node.parent
        if parent is None:
            del self._roots[node.place]
            self._ended.append(ProgramEnd(node.place, result, error))
        elif error is None:
            self._settle(parent, node.place, result)
        else:
            del parent.pending[node.place]
            self._raise_in(parent, error)

    def _settle(self, node: _Node, place: int, result: Any) -> None:
        del node.pending[place]
        node.results[place] = result
        if not node.pending:
            self._ready.append((node, node.results, None))

    def _raise_in(self, node: _Node, error: Exception) -> None:
        self._cancel_pending(node)
        self._ready.append((node, None, error))

    def _cancel_pending(self, node: _Node) -> None:
        """Give up what a program waits for: requests and functions, then programs, the innermost first."""
        nodes = [node]
        for one in nodes:  # grows on the way
            pending, one.pending = one.pending, {}
            for item in pending.values():
                if isinstance(item, _Node):
                    nodes.append(item)
                elif self._tickets.pop(item, None) is not None:
                    self._host.cancel(item)
        for one in reversed(nodes[1:]):
            self._close_program(one)

    def _close_program(self, node: _Node) -> None:
        node.is_closed = True
        try:
            node.program.close()
        except Exception:
            logger.warning("a program failed while it was closed", exc_info=True)
