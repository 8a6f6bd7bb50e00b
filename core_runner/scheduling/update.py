"""What a step's output does to the requests: new tokens and stop rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core_runner.allowed_ids import explain_failed_row
from core_runner.request import FinishReason, Request, RequestStatus, TokenLogprobs
from core_runner.scheduling.output import IntArray, Logprobs, ModelRunnerOutput
from core_runner.scheduling.slots import SlotTable
from core_runner.scheduling.step import RequestUpdate, ScheduledStep

Ended = list[tuple[Request, RequestStatus]]
_STATUS_OF: dict[FinishReason, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOP,
    "length": RequestStatus.FINISHED_LENGTH,
}


class StepResults:
    """Applies outputs. Checks are numpy over rows; tokens are appended by `map`, and Python loops over the rest."""

    def __init__(self, slots: SlotTable, eos_token_ids: Sequence[int]) -> None:
        self._slots = slots
        self.num_generated_tokens = 0
        # One entry past the largest id stands for every id above it.
        self._is_eos = np.zeros(max(eos_token_ids, default=-1) + 2, np.bool_)
        self._is_eos[list(eos_token_ids)] = True

    def apply(self, step: ScheduledStep, output: ModelRunnerOutput) -> tuple[list[RequestUpdate], Ended]:
        """Updates of requests that end or have their tokens reported, and those that end; these hold their slots."""
        slots = step.output.slots
        if (
            step.is_plain
            and step.num_changes == self._slots.num_changes
            and not self._any_ends(slots, output)
        ):
            self._slots.num_in_flight_np[slots] -= 1
            return self._take_plain_rows(step, output, None), []
        # A slot given up since the step was scheduled may have another owner now: look at such rows alone.
        is_live = self._slots.generation_np[slots] == step.generations
        self._count(step, output, is_live)
        # By request, not by slot: one that was preempted since will not have them computed again.
        for row, scored in output.prompt_logprobs.items():
            step.requests[row].prompt_logprobs.append(scored)
        careful = self._find_careful(step, output, is_live)
        updates = self._take_plain_rows(step, output, np.flatnonzero(step.samples & ~careful))
        ended: Ended = []
        for row in np.flatnonzero(step.samples & careful).tolist():
            request = step.requests[row]
            if not is_live[row]:
                request.num_in_flight -= 1
            if not request.is_finished:
                self._take_row(request, output, row, updates, ended)
        return updates, ended

    def _any_ends(self, slots: IntArray, output: ModelRunnerOutput) -> bool:
        """Whether one of these live rows failed or sampled an end id."""
        return bool(output.failed.any() or self._find_eos(slots, output).any())

    def _find_eos(self, slots: IntArray, output: ModelRunnerOutput) -> npt.NDArray[np.bool_]:
        """Rows that end with one of the model's end ids, [num_reqs]."""
        is_eos = self._is_eos.take(output.sampled_token_ids[:, 0], mode="clip")
        # Few steps hold an end id at all.
        return is_eos & self._slots.ends_at_eos_np[slots] if is_eos.any() else is_eos

    def _take_plain_rows(
        self, step: ScheduledStep, output: ModelRunnerOutput, rows: npt.NDArray[np.intp] | None
    ) -> list[RequestUpdate]:
        """Rows that bring one token each and go on; None: all of them."""
        if output.logprobs is not None:
            _append_logprobs(step.requests, output.logprobs, rows)
        slots, requests, outputs = step.output.slots, step.requests, step.outputs
        tokens = output.sampled_token_ids[:, 0]
        if rows is not None and len(rows) < len(requests):
            slots, tokens = slots[rows], tokens[rows]
            requests, outputs = [requests[row] for row in rows], [outputs[row] for row in rows]
        self._slots.num_known_np[slots] += 1
        self.num_generated_tokens += len(slots)
        token_ids = tokens.tolist()
        # The only work that grows with the running requests: `map` runs it in C.
        deque(map(list.append, outputs, token_ids), maxlen=0)
        if not step.any_reports:
            return []
        # A named tuple's own constructor takes twice as long.
        new, none = tuple.__new__, ()
        return [
            new(RequestUpdate, (request, [token], None, request.logprobs[-1:] if request.logprobs else none))
            for request, token in zip(requests, token_ids, strict=True)
            if request.reports_tokens
        ]

    def _count(self, step: ScheduledStep, output: ModelRunnerOutput, is_live: npt.NDArray[np.bool_]) -> None:
        """Replace what was assumed of the live rows by what is known."""
        table, slots = self._slots, step.output.slots[is_live]
        table.num_in_flight_np[slots] -= step.samples[is_live]
        # Without drafts nothing can be rejected, and what was assumed is what happened.
        if step.output.num_draft_tokens is not None:
            table.num_computed_np[slots] -= output.num_rejected[is_live]
            table.num_tokens_np[slots] -= output.num_rejected[is_live]

    def _find_careful(
        self, step: ScheduledStep, output: ModelRunnerOutput, is_live: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Rows that may end, or that bring anything but one plain token, [num_reqs]."""
        table, slots = self._slots, step.output.slots
        careful: npt.NDArray[np.bool_] = ~is_live | output.failed | (output.num_sampled != 1)
        careful |= self._find_eos(slots, output)
        careful |= table.needs_check_np[slots] | (table.num_known_np[slots] + 1 >= table.max_total_np[slots])
        return careful

    def _take_row(
        self,
        request: Request,
        output: ModelRunnerOutput,
        row: int,
        updates: list[RequestUpdate],
        ended: Ended,
    ) -> None:
        # Ids of a failed row mean nothing, so it ends without them.
        if output.failed[row]:
            self._fail(request, updates, ended)
            return
        # What is sampled for a preempted request counts: it resumes behind this token.
        sampled = output.sampled_token_ids[row, : output.num_sampled[row]].tolist()
        new, reason = _cut_at_stop(request, sampled)
        if request.constraint is not None and reason is None and not request.constraint.accept(new):
            self._fail(request, updates, ended)
            return
        request.output_token_ids += new
        if request.slot >= 0:
            self._slots.num_known_np[request.slot] += len(new)
        self.num_generated_tokens += len(new)
        logprobs: Sequence[TokenLogprobs] = ()
        if output.logprobs is not None:
            logprobs = _row_logprobs(request, output.logprobs, row, len(new))
            request.logprobs += logprobs
        if reason or (new and request.reports_tokens):
            updates.append(RequestUpdate(request, new, reason, logprobs))
        if reason:
            ended.append((request, _STATUS_OF[reason]))

    def _fail(self, request: Request, updates: list[RequestUpdate], ended: Ended) -> None:
        constraint = request.constraint
        request.error = constraint.error if constraint is not None else None
        request.error = request.error or explain_failed_row(request.sampling_params)
        updates.append(RequestUpdate(request, [], "error"))
        ended.append((request, RequestStatus.FINISHED_ERROR))


def _cut_at_stop(request: Request, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the first that ends the request, and why it ends."""
    # Drafts may bring more than was asked for; an end id before the limit wins.
    room = request.max_total_len - request.num_tokens
    if not request.stop_token_ids.isdisjoint(token_ids):
        for idx, token in enumerate(token_ids[:room]):
            if token in request.stop_token_ids:
                return token_ids[: idx + 1], "stop"
    return token_ids[:room], "length" if len(token_ids) >= room else None


def _append_logprobs(
    requests: Sequence[Request], logprobs: Logprobs, rows: npt.NDArray[np.intp] | None
) -> None:
    """Those of one token to every row that asked for them; rows None: all of them."""
    if logprobs.token_ids.shape[2] == 1:
        # Nobody asks for more than the token's own. One copy for all, of which each keeps a view: a few bytes a row.
        columns = (
            logprobs.token_ids[:, 0].copy(),
            logprobs.values[:, 0].copy(),
            logprobs.ranks[:, 0].tolist(),
        )
        own = list(map(TokenLogprobs._make, zip(*columns, strict=True)))
        for row in range(len(requests)) if rows is None else rows.tolist():
            if requests[row].sampling_params.logprobs is not None:
                requests[row].logprobs.append(own[row])
        return
    for row in range(len(requests)) if rows is None else rows.tolist():
        request = requests[row]
        if request.sampling_params.logprobs is not None:
            request.logprobs += _row_logprobs(request, logprobs, row, 1)


def _row_logprobs(request: Request, logprobs: Logprobs, row: int, num: int) -> list[TokenLogprobs]:
    wanted = request.sampling_params.logprobs
    if wanted is None:
        return []
    # The arrays are as wide as the batch's largest wish, and are overwritten by a later step.
    width = wanted + 1
    return [
        TokenLogprobs(
            logprobs.token_ids[row, idx, :width].copy(),
            logprobs.values[row, idx, :width].copy(),
            int(logprobs.ranks[row, idx]),
        )
        for idx in range(num)
    ]
