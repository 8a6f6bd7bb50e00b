"""Recorded steps: what a step launches as one CUDA graph, replayed with every step's own lengths.

A PyTorch operation costs the host some 10 us to issue, and a step has hundreds; a replay costs a few microseconds
in all. Kernels take their lengths from device buffers whose addresses never change, so one graph serves every step
that fits its padded sizes: what is left over are null rows and tokens that map to no place in the cache.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from core_runner.scheduling.output import SchedulerOutput
from model_states.recording import Recorder

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_LEAST_MIXED_ROWS = 16
_LEAST_TOKENS_STEP = 16
_LARGE_STEP = 2048  # from here on the device's time for padding counts more than a graph's reuse
# Attention is cut for the longest query: a large step of short prompts is faster if it may count on them.
_LONGEST_QUERIES = (256, 2048)
# Decode shapes are few by their nature; those of steps with prefill are thousands, of which few recur often.
_MAX_PREFILL_GRAPHS: Final = 128
# What fails for so many shapes fails for all, and torch keeps the memory of a recording that was broken off.
_MAX_FAILURES: Final = 8


class StepShape(NamedTuple):
    """Padded sizes of a step, and the most tokens that one of its rows may have."""

    num_tokens: int
    num_reqs: int
    max_query_len: int


@dataclass(slots=True)
class RecordedGraph:
    """One graph, and what it took. scope: "step" for all of a step, "forward" for the model's part alone.

    variant: which launches its sampling makes. record_s: seconds of the recording. num_bytes: device memory that it
    took. num_replays: steps that it served.
    """

    scope: str
    shape: StepShape
    variant: str
    record_s: float
    num_bytes: int
    replay: Callable[[], Any]
    num_replays: int = 0


_Key = tuple[str, StepShape, str]  # scope, shape, variant


class StepGraphs:
    """Chooses the padded shape of every step, and keeps a graph for each shape that recurs.

    A step without prefill is recorded when its shape first comes; one with prefill, of which there are many shapes,
    when its shape comes again, until there are 128 such graphs. None is dropped: its replay may be in flight. A graph
    whose recording fails is not tried again, the others stay, and a scope that has failed eight times records no more.
    `counts` says how many steps went which way.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, recorder: Recorder | None) -> None:
        """max_num_reqs, max_num_tokens: R and T. recorder: None runs everything eagerly."""
        self._recorder = recorder
        self._max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        small = [rows for rows in (1, 2, 4, 8, 16) if rows < max_num_reqs]
        self.decode_rows = [*small, *range(32, max_num_reqs, 32), max_num_reqs]
        self._graphs: dict[_Key, RecordedGraph] = {}
        self._refused: dict[_Key, str] = {}  # why it cannot be recorded
        self._num_failures: Counter[str] = Counter()  # by scope
        self._num_prefill_graphs = 0
        self._met: set[_Key] = set()
        self.counts: Counter[str] = Counter()

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded at all."""
        return self._recorder is not None

    @property
    def graphs(self) -> list[RecordedGraph]:
        """What has been recorded so far, in that order."""
        return list(self._graphs.values())

    def shape(self, step: SchedulerOutput) -> StepShape | None:
        """Sizes to pad the step to, or None where it must run eagerly."""
        if self._recorder is None:
            self.counts["eager: no graphs"] += 1
            return None
        if step.total_num_tokens == step.num_reqs:
            return self.decode_shape(step.num_reqs)
        num_tokens = _round_up(step.total_num_tokens)
        num_rows = max(1 << (step.num_reqs - 1).bit_length(), _LEAST_MIXED_ROWS)
        num_tokens = min(num_tokens, self.max_num_tokens)
        longest = _longest_query(num_tokens, int(step.num_scheduled_tokens.max()))
        return StepShape(num_tokens, min(num_rows, self._max_num_reqs), longest)

    def full_shapes(self) -> list[StepShape]:
        """Shapes of the largest steps: one for each bound of the longest query, and one as small as a decode step."""
        most, rows = self.max_num_tokens, self._max_num_reqs
        longest = {_longest_query(most, bound) for bound in (*_LONGEST_QUERIES, most)}
        return [StepShape(rows, rows, rows), *(StepShape(most, rows, bound) for bound in sorted(longest))]

    def decode_shape(self, num_reqs: int) -> StepShape:
        """Sizes of a step in which each of `num_reqs` rows has one token."""
        num_rows = self.decode_rows[bisect_left(self.decode_rows, num_reqs)]
        return StepShape(num_rows, num_rows, 1)

    def is_refused(self, scope: str, shape: StepShape, variant: str) -> bool:
        """Whether `run` would run it eagerly from now on: its recording failed, or too many of its scope's have."""
        key = (scope, shape, variant)
        return key not in self._graphs and (
            key in self._refused or self._num_failures[scope] >= _MAX_FAILURES
        )

    def run(self, scope: str, shape: StepShape, variant: str, body: Callable[[], _T]) -> _T:
        """The result of `body`, which is replayed where it was recorded before.

        Every call with the same scope, shape and variant must launch the same kernels on the same buffers. Raises
        RuntimeError where a recording fails and leaves a device that cannot be used.
        """
        key = (scope, shape, variant)
        recorded = self._graphs.get(key)
        if recorded is not None:
            recorded.num_replays += 1
            self.counts[f"{scope} graph"] += 1
            result: _T = recorded.replay()
            return result
        self.counts[f"eager: {self._explain_eager(key)}"] += 1
        # Once outside the recording: it compiles what is missing, and it is this step's result, so that
        # state which each run advances is advanced once.
        result = body()
        if self._recorder is not None and self._is_due(key):
            self._record(self._recorder, key, body)
        self._met.add(key)
        return result

    def report(self) -> str:
        """Which graphs there are, what they took and how often they served, a line each; what could not be recorded
        and why; then the steps' ways.
        """
        graphs = [
            f"{_describe(g.scope, g.shape, g.variant)} {g.num_bytes / 2**20:7.1f} MiB {g.record_s * 1000:7.0f} ms "
            f"{g.num_replays:8} replays"
            for g in self.graphs
        ]
        refused = [f"{_describe(*key)} not recorded: {reason}" for key, reason in self._refused.items()]
        limit = f"{self._num_prefill_graphs} of at most {_MAX_PREFILL_GRAPHS} graphs with prefill"
        ways = [f"{count:8} steps {way}" for way, count in self.counts.most_common()]
        stopped = [
            f"no further graph of a {scope} is recorded after {count} that failed"
            for scope, count in self._num_failures.items()
            if count >= _MAX_FAILURES
        ]
        return "\n".join([*graphs, *refused, *stopped, limit, *ways])

    def _explain_eager(self, key: _Key) -> str:
        scope, shape, _ = key
        if self.is_refused(*key):
            return f"this {scope} cannot be recorded"
        if shape.max_query_len > 1 and self._num_prefill_graphs == _MAX_PREFILL_GRAPHS:
            return "no more graphs with prefill"
        return f"no {scope} graph of this shape yet"

    def _is_due(self, key: _Key) -> bool:
        """Whether something that has just run eagerly is to be recorded."""
        if self.is_refused(*key):
            return False
        return key[1].max_query_len == 1 or (
            key in self._met and self._num_prefill_graphs < _MAX_PREFILL_GRAPHS
        )

    def _record(self, recorder: Recorder, key: _Key, body: Callable[[], Any]) -> None:
        started, free_bytes = time.perf_counter(), recorder.free_bytes()
        try:
            replay = recorder.record(body)
        except RuntimeError as error:
            # Raises where it is the device that failed, so that nothing could go on.
            recorder.free_bytes()
            self._refuse(key, str(error).partition("\n")[0] or type(error).__name__)
            return
        seconds, num_bytes = time.perf_counter() - started, max(free_bytes - recorder.free_bytes(), 0)
        self._graphs[key] = RecordedGraph(*key, seconds, num_bytes, replay)
        self._num_prefill_graphs += key[1].max_query_len > 1
        logger.debug("recorded a %s graph of %s in %.0f ms", key[0], key[1], seconds * 1000)

    def _refuse(self, key: _Key, reason: str) -> None:
        # The first says what there is to know; where memory runs out, there may be many.
        level = logging.DEBUG if self._refused else logging.WARNING
        logger.log(
            level,
            "a %s of %d tokens in %d rows cannot be recorded as a CUDA graph (%s); such steps run without, others are "
            "not affected",
            key[0],
            key[1].num_tokens,
            key[1].num_reqs,
            reason,
        )
        self._refused[key] = reason
        self._num_failures[key[0]] += 1


def _describe(scope: str, shape: StepShape, variant: str) -> str:
    return f"{scope:8} {shape.num_tokens:6} tokens {shape.num_reqs:5} rows {variant or '-':9}"


def _longest_query(num_tokens: int, longest: int) -> int:
    """The bound that a step of so many tokens is recorded with, where its longest row has `longest`."""
    bounds = (bound for bound in _LONGEST_QUERIES if num_tokens > _LARGE_STEP and longest <= bound)
    return next(bounds, num_tokens)


def _round_up(num_tokens: int) -> int:
    """The next of eight sizes an octave, or sixteen for large steps: little of a step is padding."""
    shift = 4 if num_tokens <= _LARGE_STEP else 5
    step = max(1 << max((num_tokens - 1).bit_length() - shift, 0), _LEAST_TOKENS_STEP)
    return -(-num_tokens // step) * step
