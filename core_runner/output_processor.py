"""From what a step brought to text: detokenization, stop strings, and the results that users see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from core_runner.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, TextDelta
from core_runner.request import Request, TokenLogprobs
from core_runner.scheduling.step import RequestUpdate
from core_runner.text import IncrementalDetokenizer, Tokenizer

Sink = Callable[[TextDelta], None]
FinishEarly = Callable[[str], object]


@dataclass(slots=True)
class _Tracked:
    """One request on its way: where its deltas go, and its text so far."""

    request: Request
    request_index: int
    prompt: str | None
    sink: Sink
    stream: bool
    wants_text: bool
    # Only requests that stream or have stop strings pay for detokenizing token by token.
    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class OutputProcessor:
    """Tracks requests from admission to their last delta. `tokenizer` None: no text, token ids only."""

    def __init__(self, tokenizer: Tokenizer | None, finish_early: FinishEarly) -> None:
        """finish_early(req_id) ends a request whose stop string has come, in the scheduler."""
        self._tokenizer = tokenizer
        self._finish_early = finish_early
        self._tracked: dict[str, _Tracked] = {}
        # By prompt of several completions, which is done when all of them are.
        self._completed: dict[str, list[tuple[Request, CompletionOutput]]] = {}

    def track(
        self,
        request: Request,
        request_index: int,
        prompt: str | None,
        sink: Sink,
        stream: bool,
        wants_text: bool = True,
    ) -> None:
        """Send this request's deltas to `sink`: one per step when it streams, else only the last.

        wants_text: False leaves the text empty, where stop strings do not need it, and log-probabilities out, which
        whoever has the request finds there.
        """
        params = request.sampling_params
        request.reports_tokens = stream or bool(params.stop)
        detokenizer = None
        if self._tokenizer is not None and (stream or params.stop):
            detokenizer = IncrementalDetokenizer(
                self._tokenizer, skip_special_tokens=params.skip_special_tokens, stop=tuple(params.stop)
            )
        self._tracked[request.req_id] = _Tracked(
            request, request_index, prompt, sink, stream, wants_text, detokenizer
        )

    def forget(self, prompt_id: str, req_ids: Iterable[str]) -> None:
        """Drop a prompt and its requests, whose caller has gone; their later updates go nowhere."""
        self._completed.pop(prompt_id, None)
        for req_id in req_ids:
            self._tracked.pop(req_id, None)

    def end_aborted(self) -> None:
        """End the requests that have ended without an update: the engine was closed, or a step interrupted."""
        for tracked in list(self._tracked.values()):
            if tracked.request.is_finished:
                self._process_one(tracked, tracked.request.finish_reason)

    def process(self, updates: Sequence[RequestUpdate]) -> None:
        """Turn a step's updates into deltas."""
        for update in updates:
            tracked = self._tracked.get(update.request.req_id)
            if tracked is not None:
                self._process_one(tracked, update.finish_reason)

    def _process_one(self, tracked: _Tracked, finish_reason: FinishReason | None) -> None:
        # Taken from the request, not from its update: one that Ctrl-C has swallowed then leaves no gap.
        new_token_ids = tracked.request.output_token_ids[len(tracked.token_ids) :]
        tracked.token_ids += new_token_ids
        tracked.logprobs += tracked.request.logprobs[len(tracked.logprobs) :]
        text = ""
        detokenizer = tracked.detokenizer
        if detokenizer is not None:
            text = detokenizer.push(new_token_ids)
            if detokenizer.stopped is not None:
                finish_reason = "stop"
                self._finish_early(tracked.request.req_id)
            elif finish_reason is not None:
                text += detokenizer.finish()
        if finish_reason is not None:
            self._finish(tracked, text, new_token_ids, finish_reason)
        elif tracked.stream:
            index = tracked.request.index
            tracked.sink(TextDelta(tracked.request_index, text, new_token_ids, index=index))

    def _finish(self, tracked: _Tracked, text: str, new_token_ids: list[int], reason: FinishReason) -> None:
        del self._tracked[tracked.request.req_id]
        request, detokenizer = tracked.request, tracked.detokenizer
        completion = CompletionOutput(
            index=request.index,
            text=self._decode(tracked) if detokenizer is None else detokenizer.text,
            token_ids=tracked.token_ids,
            finish_reason=reason,
            stop_reason=_stop_reason(tracked, reason),
            logprobs=_as_dicts(tracked.logprobs) if self._wants_logprobs(tracked) else None,
        )
        output = self._collect(tracked, completion)
        if tracked.stream or output is not None:
            last_text = completion.text if detokenizer is None else text
            index = tracked.request_index
            tracked.sink(TextDelta(index, last_text, new_token_ids, reason, output, request.index))

    def _collect(self, tracked: _Tracked, completion: CompletionOutput) -> RequestOutput | None:
        """The whole result, if this was the last completion that its prompt waited for."""
        request = tracked.request
        if request.group is None:
            return _result(tracked, [(request, completion)])
        completed = self._completed.setdefault(request.prompt_id, [])
        completed.append((request, completion))
        if len(completed) < request.group.size:
            return None
        del self._completed[request.prompt_id]
        completed.sort(key=lambda pair: pair[0].index)
        return _result(tracked, completed)

    def _wants_logprobs(self, tracked: _Tracked) -> bool:
        return tracked.wants_text and tracked.request.sampling_params.logprobs is not None

    def _decode(self, tracked: _Tracked) -> str:
        if self._tokenizer is None or not tracked.wants_text:
            return ""
        skip = tracked.request.sampling_params.skip_special_tokens
        return self._tokenizer.decode(tracked.token_ids, skip_special_tokens=skip)


def _result(tracked: _Tracked, completed: Sequence[tuple[Request, CompletionOutput]]) -> RequestOutput:
    """What became of a prompt: its completions by index, with their requests."""
    first = completed[0][0]
    errors = [_error(request) for request, completion in completed if completion.finish_reason == "error"]
    return RequestOutput(
        request_id=first.prompt_id,
        prompt=tracked.prompt,
        prompt_token_ids=first.prompt_token_ids.tolist(),
        outputs=[completion for _, completion in completed],
        finished=True,
        num_cached_tokens=max(first.num_cached_tokens, 0),
        error=errors[0] if errors else None,
        prompt_logprobs=_prompt_dicts(first),
    )


def _stop_reason(tracked: _Tracked, reason: FinishReason) -> str | int | None:
    if reason != "stop":
        return None
    if tracked.detokenizer is not None and tracked.detokenizer.stopped is not None:
        return tracked.detokenizer.stopped
    last = tracked.token_ids[-1]
    return last if last in tracked.request.sampling_params.stop_token_ids else None


def _error(request: Request) -> str:
    return request.error or "the model's logits held NaN or allowed no token"


def _as_dicts(logprobs: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]]:
    return [_as_dict(token.token_ids.tolist(), token.values.tolist(), token.rank) for token in logprobs]


def _prompt_dicts(request: Request) -> list[dict[int, Logprob] | None] | None:
    """One for each token but the first; None where none were asked for, or the request ended before they came."""
    if request.sampling_params.prompt_logprobs is None:
        return None
    result: list[dict[int, Logprob] | None] = [None]
    for scored in request.prompt_logprobs:
        columns = (scored.token_ids.tolist(), scored.values.tolist(), scored.ranks.tolist())
        result += [_as_dict(*token) for token in zip(*columns, strict=True)]
    return result if len(result) == request.prompt_len else None


def _as_dict(ids: list[int], values: list[float], rank: int) -> dict[int, Logprob]:
    """The token itself first, then the best ids in order, whose rank is their column."""
    entry = {ids[0]: Logprob(values[0], rank)}
    for column in range(1, len(ids)):
        entry.setdefault(ids[column], Logprob(values[column], column))
    return entry
