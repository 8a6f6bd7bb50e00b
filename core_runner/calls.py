"""One call of `LLM`: its requests on their way into the engine, and what of them is handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from core_runner.engine import Engine
from core_runner.output_processor import OutputProcessor
from core_runner.outputs import CompletionOutput, RequestOutput, TextDelta
from core_runner.request import Request

_LEAST_FED = 64  # requests


class Job(NamedTuple):
    """One prompt of a call: its text, if it came as text, and its requests, or the result that refuses it."""

    prompt: str | None
    requests: Sequence[Request | RequestOutput]


def refusal(req_id: str, prompt: str | None, error: str) -> RequestOutput:
    """The result of a prompt that is not even tried."""
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    return RequestOutput(req_id, prompt, [], [completion], finished=True, error=error)


class Call:
    """Requests that wait outside the engine, those that are in it, and deltas that nobody has taken yet.

    Several calls share an engine: whoever calls `feed`, `cancel` or `abandon` holds the lock.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        stream: bool,
        engine: Engine,
        processor: OutputProcessor,
        *,
        wants_text: bool = True,
        most_queued: int | None = None,
    ) -> None:
        """wants_text: see `OutputProcessor.track`. most_queued: feed while fewer requests are queued."""
        self._engine, self._processor, self._stream = engine, processor, stream
        self._wants_text, self._most_queued = wants_text, most_queued
        self._waiting = deque(
            (index, job.prompt, request) for index, job in enumerate(jobs) for request in job.requests
        )
        self._unfinished: dict[int, tuple[str, list[str]]] = {}  # names of a prompt and of its requests
        self._deltas: deque[TextDelta] = deque()

    @property
    def is_open(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._waiting or self._unfinished or self._deltas)

    @property
    def num_open(self) -> int:
        """Requests that wait, and prompts that are unfinished."""
        return len(self._waiting) + len(self._unfinished)

    def add(self, index: int, job: Job, *, soon: bool = False) -> None:
        """One more job, under an index that no other has; soon: before those that wait."""
        entries = [(index, job.prompt, request) for request in job.requests]
        if soon:
            self._waiting.extendleft(reversed(entries))
        else:
            self._waiting.extend(entries)

    def feed(self) -> None:
        """Queue as many requests as one step can take: the device has work before the last of many is queued."""
        config = self._engine.config
        num_requests = num_tokens = 0
        while self._waiting and self._has_room():
            # Those that hit the prefix cache take less of a step than their length says.
            is_enough = num_tokens >= config.max_num_batched_tokens and num_requests >= _LEAST_FED
            # By priority the last one may come first.
            if is_enough and config.policy == "fcfs":
                break
            index, prompt, request = self._waiting.popleft()
            num_requests, num_tokens = num_requests + 1, num_tokens + len(request.prompt_token_ids)
            self._start(index, prompt, request)

    def take(self) -> Iterator[TextDelta]:
        """The deltas that have come."""
        while self._deltas:
            delta = self._deltas.popleft()
            if delta.output is not None:
                self._unfinished.pop(delta.request_index, None)
            yield delta

    def cancel(self, index: int) -> None:
        """Give up one job, wherever it stands; a delta of it may still be handed out."""
        if any(entry[0] == index for entry in self._waiting):
            self._waiting = deque(entry for entry in self._waiting if entry[0] != index)
        if index in self._unfinished:
            self._abort(*self._unfinished.pop(index))

    def abandon(self) -> None:
        """Abort what is unfinished, and come to rest if nobody else has anything to run."""
        self._waiting.clear()
        for prompt_id, req_ids in self._unfinished.values():
            self._abort(prompt_id, req_ids)
        self._unfinished.clear()
        if not self._engine.scheduler.has_unfinished:
            self._engine.settle()

    def _has_room(self) -> bool:
        scheduler, most = self._engine.scheduler, self._most_queued
        return scheduler.has_room and (most is None or scheduler.num_waiting < most)

    def _abort(self, prompt_id: str, req_ids: Sequence[str]) -> None:
        self._processor.forget(prompt_id, req_ids)
        for req_id in req_ids:
            self._engine.abort(req_id)

    def _start(self, index: int, prompt: str | None, request: Request | RequestOutput) -> None:
        if isinstance(request, RequestOutput):
            self._deltas.append(TextDelta(index, "", [], "error", request))
            return
        # Known here before the engine knows it: then an interrupt in between leaves nothing behind.
        self._unfinished.setdefault(index, (request.prompt_id, []))[1].append(request.req_id)
        self._processor.track(
            request, index, prompt, self._deltas.append, self._stream, wants_text=self._wants_text
        )
        self._engine.add_request(request)
