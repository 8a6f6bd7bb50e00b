"""Programs over an engine: their requests go the way of any other, their functions go to threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final

from core_runner.calls import Call, Job
from core_runner.errors import RequestError
from core_runner.outputs import RequestOutput
from core_runner.programs import ProgramEnd, Programs
from core_runner.request import Request
from core_runner.sampling_params import SamplingParams
from model_states.tasks import Program, TaskOutput, TaskRequest

_MOST_THREADS: Final = 16

# Makes the job of a prompt with model inputs; raises `RequestError` for one that cannot be served.
MakeJob = Callable[[Any, SamplingParams], Job]


class TaskCall:
    """A call that runs programs: a `Host` for them, and the loop that feeds, steps and hands out results."""

    def __init__(
        self,
        call: Call,
        make_job: MakeJob,
        step: Callable[[], None],
        lock: threading.RLock,
        most_requests: int,
    ) -> None:
        """call: without jobs. step: one step of the engine, for the requests of every caller. lock: the engine's.

        most_requests: a further program is begun while fewer are unfinished.
        """
        self._call, self._make_job, self._step, self._lock = call, make_job, step, lock
        self._most_requests = most_requests
        self._programs = Programs(self)
        self._num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._threads: ThreadPoolExecutor | None = None
        self._requests: dict[int, Request] = {}
        self._work: dict[int, Future[Any]] = {}
        self._done: SimpleQueue[int] = SimpleQueue()  # tickets of work

    # ---- what programs wait for

    def start_request(self, ticket: int, request: TaskRequest, *, soon: bool) -> None:
        """See `Host.start_request`."""
        try:
            params = SamplingParams(**request.params)
        except TypeError as error:
            raise RequestError(f"params of a task's request: {error}") from error
        if params.n != 1:
            raise RequestError(f"n={params.n} in a task's request must be 1; yield several requests")
        prompt = {"prompt_token_ids": request.prompt_token_ids, "model_inputs": request.model_inputs}
        job = self._make_job(prompt, params)
        (made,) = job.requests
        assert isinstance(made, Request), "one that cannot be served is refused by then"
        self._requests[ticket] = made
        self._call.add(ticket, job, soon=soon)

    def start_work(self, ticket: int, function: Callable[[], Any]) -> None:
        """See `Host.start_work`."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, "core-runner-task")
        self._work[ticket] = future = self._threads.submit(function)
        future.add_done_callback(lambda _: self._done.put(ticket))

    def cancel(self, ticket: int) -> None:
        """See `Host.cancel`. A function that runs is not interrupted; what it gives is dropped."""
        future = self._work.pop(ticket, None)
        if future is not None:
            future.cancel()
            return
        self._requests.pop(ticket, None)
        with self._lock:
            self._call.cancel(ticket)

    # ---- the loop

    def run(
        self, programs: Iterable[Program], on_advance: Callable[[], None] | None = None
    ) -> Generator[ProgramEnd, None, None]:
        """Begin programs as there is room, and give each as it ends. Closing gives up the rest.

        on_advance: called when some have gone on, outside of them: what it raises ends this call.
        """
        source = enumerate(programs)
        is_drained = False
        try:
            while not is_drained or len(self._programs):
                ended = self._advance()
                while not is_drained and self._has_room():
                    is_drained = not self._begin_next(source)
                    ended += self._advance()
                if on_advance is not None:
                    on_advance()
                yield from ended
                self._bring_on()
        finally:
            self._close()

    def _advance(self) -> list[ProgramEnd]:
        """With the lock: a program may look at what the model keeps, which the step of another caller would change."""
        with self._lock:
            return self._programs.advance()

    def _has_room(self) -> bool:
        return self._call.num_open < self._most_requests and len(self._work) <= self._num_threads

    def _begin_next(self, source: Iterator[tuple[int, Program]]) -> bool:
        begun = next(source, None)
        if begun is not None:
            self._programs.add(*begun)
        return begun is not None

    def _bring_on(self) -> None:
        """Take what has come. If nothing has: one step; with no request on its way, wait for a thread."""
        with self._lock:
            self._call.feed()
        num_taken = 0
        for delta in self._call.take():
            assert delta.output is not None, "only the last delta is handed out without streaming"
            self._take_output(delta.request_index, delta.output)
            num_taken += 1
        while not self._done.empty() or (self._work and not num_taken and not self._call.is_open):
            self._take_work(self._done.get())
            num_taken += 1
        if self._call.is_open and not num_taken:
            self._step()

    def _take_output(self, ticket: int, output: RequestOutput) -> None:
        request = self._requests.pop(ticket, None)
        if request is None:  # given up
            return
        (completion,) = output.outputs
        reason = completion.finish_reason
        if reason not in ("stop", "length", "error"):
            error = RequestError("the engine was closed or interrupted before a task's request was done")
            self._programs.fail(ticket, error)
            return
        # The sampled token comes first.
        logprobs = [float(token.values[0]) for token in request.logprobs]
        self._programs.deliver(ticket, TaskOutput(completion.token_ids, reason, logprobs, output.error))

    def _take_work(self, ticket: int) -> None:
        future = self._work.pop(ticket, None)
        if future is None:  # given up
            return
        error = future.exception()
        if error is None:
            self._programs.deliver(ticket, future.result())
        elif isinstance(error, Exception):
            self._programs.fail(ticket, error)
        else:
            raise error

    def _close(self) -> None:
        """Give up the requests, then the programs, then wait for threads that are in the middle of something."""
        try:
            with self._lock:
                self._call.abandon()
        finally:
            self._programs.close()
            if self._threads is not None:
                self._threads.shutdown(cancel_futures=True)
