"""Streams: closed early, interleaved, nested, interrupted; whatever happens, the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from support.drained import Drained
from support.phases import PHASES, at_phases
from support.toy_model import ToyTable

from core_runner import LLM, SamplingParams
from model_states import Component, hookimpl

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 6, 7], [4], [9, 8, 7, 6, 5], [2, 2], [3]]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def llm(request: pytest.FixtureRequest, toy_options: dict[str, Any], drained: Drained) -> LLM:
    return drained(**toy_options, max_num_reqs=3, num_blocks=24, async_scheduling=request.param)


def _check(outputs: list[Any], prompts: list[list[int]], table: ToyTable) -> None:
    assert [o.outputs[0].token_ids for o in outputs] == [table.greedy(prompt, 10) for prompt in prompts]


def _outputs(deltas: list[Any]) -> list[Any]:
    return [d.output for d in sorted(deltas, key=lambda d: d.request_index) if d.output is not None]


def _in_use(llm: LLM) -> tuple[int, int]:
    stats = llm.stats()
    return stats.running + stats.waiting, stats.max_num_reqs - stats.free_slots


def test_deltas_hold_each_token_once(llm: LLM, toy_table: ToyTable) -> None:
    deltas = list(llm.stream(PROMPTS, GREEDY))
    for index, output in enumerate(_outputs(deltas)):
        own = [delta for delta in deltas if delta.request_index == index]
        assert [t for delta in own for t in delta.token_ids] == output.outputs[0].token_ids
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]
    _check(_outputs(deltas), PROMPTS, toy_table)


def test_closing_a_stream_aborts_what_is_left(llm: LLM, toy_table: ToyTable) -> None:
    for num_read in (0, 1, 4, 30):
        stream = llm.stream(PROMPTS, GREEDY)
        for _ in range(num_read):
            next(stream)
        stream.close()
        assert _in_use(llm) == (0, 0), f"closed after {num_read} deltas"
    _check(llm.generate(PROMPTS, GREEDY), PROMPTS, toy_table)


def test_a_stream_that_is_only_dropped(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    assert _in_use(llm)[0] > 0
    del stream
    assert _in_use(llm) == (0, 0)


def test_streams_interleave(llm: LLM, toy_table: ToyTable) -> None:
    streams, got = [llm.stream(PROMPTS[:3], GREEDY), llm.stream(PROMPTS[3:], GREEDY)], ([], [])
    open_ones = [0, 1]
    while open_ones:
        for i in list(open_ones):
            delta = next(streams[i], None)
            if delta is None:
                open_ones.remove(i)
            else:
                got[i].append(delta)
    _check(_outputs(got[0]), PROMPTS[:3], toy_table)
    _check(_outputs(got[1]), PROMPTS[3:], toy_table)


def test_generate_inside_a_half_consumed_stream(llm: LLM, toy_table: ToyTable) -> None:
    stream = llm.stream(PROMPTS[:3], GREEDY)
    deltas = [next(stream) for _ in range(4)]
    _check(llm.generate(PROMPTS[3:], GREEDY), PROMPTS[3:], toy_table)
    deltas += stream
    _check(_outputs(deltas), PROMPTS[:3], toy_table)


def test_generate_beside_a_stream_that_fills_the_queue(
    toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    """The inner call must step the engine for the queue to have room, though nothing of its own is in there."""
    llm = drained(**toy_options, max_num_reqs=1, max_waiting=1)
    stream = llm.stream(PROMPTS[:3], GREEDY)
    deltas = [next(stream)]
    _check(llm.generate(PROMPTS[3:], GREEDY), PROMPTS[3:], toy_table)
    deltas += stream
    _check(_outputs(deltas), PROMPTS[:3], toy_table)


def test_closing_the_llm_ends_open_streams(llm: LLM, toy_table: ToyTable) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    deltas = [next(stream) for _ in range(4)]
    llm.close()
    deltas += stream
    ended = _outputs(deltas)
    assert {o.outputs[0].finish_reason for o in ended[:3]} == {"abort"}
    for prompt, output in zip(PROMPTS, ended, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == toy_table.greedy(prompt, 10)[: len(tokens)]
        assert tokens == [
            t
            for d in deltas
            if d.output is output or d.request_index == ended.index(output)
            for t in d.token_ids
        ]


class Interrupted(Component):
    """Raises in a hook, once, when it is armed."""

    armed: str | None = None
    error: type[BaseException] = KeyboardInterrupt

    def _at(self, hook: str) -> None:
        if self.armed == hook:
            self.armed = None
            raise self.error(hook)

    @hookimpl
    def add_request(self, slot):
        self._at("add_request")

    @hookimpl
    def remove_request(self, slot):
        self._at("remove_request")

    @hookimpl
    def apply_staged_writes(self):
        self._at("apply_staged_writes")

    @hookimpl
    def preprocess_state(self, batch):
        self._at("preprocess_state")

    @hookimpl
    def after_forward(self, batch):
        self._at("after_forward")

    @hookimpl
    def postprocess_state(self, batch):
        self._at("postprocess_state")


HOOKS = [
    "add_request",
    "remove_request",
    "apply_staged_writes",
    "preprocess_state",
    "after_forward",
    "postprocess_state",
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_in_a_hook_leaves_the_engine_usable(
    is_async: bool,
    error: type[BaseException],
    toy_options: dict[str, Any],
    toy_table: ToyTable,
    drained: Drained,
) -> None:
    extension = Interrupted()
    extension.error = error
    llm = drained(
        **toy_options, extensions=[extension], max_num_reqs=3, num_blocks=24, async_scheduling=is_async
    )
    for hook in HOOKS:
        stream = llm.stream(PROMPTS, GREEDY)
        next(stream)
        extension.armed = hook
        with pytest.raises(error, match=hook):
            list(stream)
        assert _in_use(llm) == (0, 0), hook
        _check(llm.generate(PROMPTS, GREEDY), PROMPTS, toy_table)


def _interrupt_once(phase: str) -> Callable[[str], None]:
    calls = []

    def callback(at: str) -> None:
        calls.append(at)
        if at == phase and calls.count(phase) == 3:
            raise KeyboardInterrupt(phase)

    return callback


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_at_every_phase_leaves_the_engine_usable(phase: str, llm: LLM, toy_table: ToyTable) -> None:
    with at_phases(llm.engine, _interrupt_once(phase)), pytest.raises(KeyboardInterrupt, match=phase):
        llm.generate(PROMPTS, GREEDY)
    assert _in_use(llm) == (0, 0)
    _check(llm.generate(PROMPTS, GREEDY), PROMPTS, toy_table)


def test_ctrl_c_after_steps_with_much_to_write(
    toy_options: dict[str, Any], drained: Drained, toy_table: ToyTable
) -> None:
    """Buffers that a step has grown are written to outside of a step, too."""
    options = {**toy_options, "max_num_reqs": 40, "max_num_batched_tokens": 4096, "num_blocks": 4000}
    llm = drained(**options)
    llm.generate([[token] * 100 for token in range(3, 43)], GREEDY)
    with at_phases(llm.engine, _interrupt_once("after sample_tokens")), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:2], GREEDY)
    assert _in_use(llm) == (0, 0)
    _check(llm.generate(PROMPTS, GREEDY), PROMPTS, toy_table)


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_one_call_ends_the_streams_of_others(phase: str, llm: LLM, toy_table: ToyTable) -> None:
    """They may lose their requests, but they say so, and do not wait for ever."""
    other = llm.stream(PROMPTS[:2], GREEDY)
    deltas = [next(other)]
    with at_phases(llm.engine, _interrupt_once(phase)), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[2:], GREEDY)
    deltas += other
    for prompt, output in zip(PROMPTS, _outputs(deltas), strict=False):
        (completion,) = output.outputs
        assert completion.finish_reason in ("abort", "length")
        assert completion.token_ids == toy_table.greedy(prompt, 10)[: len(completion.token_ids)]
    _check(llm.generate(PROMPTS, GREEDY), PROMPTS, toy_table)


def test_streams_whose_requests_are_gone_end_without_a_further_step(llm: LLM) -> None:
    """Others may keep the engine busy for ever, so they must not wait for it to come to rest."""
    closed, interrupted = llm.stream(PROMPTS[:2], GREEDY), llm.stream(PROMPTS[2:4], GREEDY)
    next(closed)
    llm.close()
    next(interrupted)
    with at_phases(llm.engine, _interrupt_once("after schedule")), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[4:], GREEDY)
    with patch.object(llm.engine, "step", side_effect=AssertionError):
        for stream in (closed, interrupted):
            assert {output.outputs[0].finish_reason for output in _outputs(list(stream))} == {"abort"}


def test_ctrl_c_while_results_are_handed_out(llm: LLM, toy_table: ToyTable) -> None:
    other = llm.stream(PROMPTS[:2], GREEDY)
    deltas = [next(other)]
    with (
        patch.object(llm._processor, "process", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        llm.generate(PROMPTS[2:], GREEDY)
    deltas += other
    assert len(_outputs(deltas)) == 2
    _check(llm.generate(PROMPTS, GREEDY), PROMPTS, toy_table)


def test_a_failing_progress_callback_aborts_the_rest(llm: LLM, toy_table: ToyTable) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, GREEDY, progress=fail)
    assert _in_use(llm) == (0, 0)
    _check(llm.generate(PROMPTS, GREEDY), PROMPTS, toy_table)
