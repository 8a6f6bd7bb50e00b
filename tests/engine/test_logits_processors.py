"""Logits processors of plugins: the rows that ask for them and no others, in every way of running a request."""

from __future__ import annotations

import importlib
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drained import Drained
from support.phases import pushing_out
from support.toy_model import ToyTable, weight

from core_runner import (
    LLM,
    ModelRunner,
    NewRequest,
    RequestError,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
)
from core_runner.errors import SchedulerOutputError
from model_states import Component, LogitsProcessor, PluginHookError, PluginManager, hookimpl

EXAMPLE = Path(__file__).parents[2] / "examples" / "logits_processor"
WAYS = {
    "at once": {},
    "synchronous": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 3},
    "tight": {"num_blocks": 16},
}
_draw = random.Random(9)
PROMPTS = [[_draw.randrange(50) for _ in range(length)] for length in (5, 1, 12, 3, 7)]
# A prompt longer than the ring, and one whose window reaches over its beginning.
PROMPTS[2] = [i % 50 for i in range(80)]
WINDOWS = [8, None, 20, 1, 64]


@pytest.fixture
def no_repeat(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("no_repeat")


def asking(window: int | None, **options: Any) -> SamplingParams:
    asked = {} if window is None else {"no_repeat": {"window": window}}
    options = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **options}
    return SamplingParams(logits_processors=asked, **options)


def walk(table: ToyTable, prompt: list[int], window: int | None, max_tokens: int = 20) -> list[int]:
    """What greedy decoding must give, one token at a time."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        key = sum(token * weight(place) for place, token in enumerate(tokens))
        logits = table.table[key % len(table.table)].clone()
        if window is not None:
            logits[tokens[-window:]] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("way", WAYS)
def test_every_row_gets_what_it_asked_for(
    way: str, no_repeat: Any, toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    options = {**toy_options, "block_size": 8, "max_num_reqs": 4, **WAYS[way]}
    llm = drained(**options, extensions=[no_repeat.NoRepeatExtension()])
    squeezed = pushing_out(llm.engine, 15) if way != "tight" else nullcontext([1])
    with squeezed as pushed_out:
        outputs = llm.generate(PROMPTS, [asking(window) for window in WINDOWS])
    assert pushed_out
    assert way != "tight" or llm.stats().preemptions > 0
    want = [walk(toy_table, prompt, window) for prompt, window in zip(PROMPTS, WINDOWS, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == want
    assert want[0] != walk(toy_table, PROMPTS[0], None), "the processor has something to do"


class Spy(LogitsProcessor):
    """Counts its calls, adds to one id, and looks at what it is given."""

    name = "spy"

    def __init__(self, name: str = "spy") -> None:
        self.name = name
        self.calls: list[Any] = []
        self.boost: dict[int, float] = {}

    def validate(self, options):
        if "crash" in options:
            raise KeyError("missing")
        if not isinstance(options.get("add"), float):
            raise ValueError("give add, a float")

    def add_request(self, slot, request, options):
        self.calls.append(("add", slot))
        self.boost[slot] = options["add"]

    def remove_request(self, slot):
        self.calls.append(("remove", slot))
        del self.boost[slot]

    def apply_staged_writes(self):
        self.calls.append("apply")

    def process(self, logits, rows):
        assert logits.dtype == torch.float32
        assert {t.dtype for t in (rows.slots, rows.positions, rows.last_token_ids)} == {torch.int64}
        self.calls.append(
            ("process", rows.slots.tolist(), rows.positions.tolist(), rows.last_token_ids.tolist())
        )
        # Columns of rows that are not its own would be changed here if there were any.
        logits[:, 7] += torch.tensor([self.boost[slot] for slot in rows.slots.tolist()])


class Brings(Component):
    def __init__(self, *processors: Any) -> None:
        self.processors = list(processors)

    @hookimpl
    def logits_processors(self):
        return self.processors


def serve(spies: list[Spy], toy_options: dict[str, Any], drained: Drained, **options: Any) -> LLM:
    return drained(**{**toy_options, **options}, extensions=[Brings(spy) for spy in spies])


def spying(**options: Any) -> SamplingParams:
    base = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    return SamplingParams(**{**base, **options})


def test_a_processor_is_told_slots_positions_and_last_tokens(
    toy_options: dict[str, Any], drained: Drained
) -> None:
    spy = Spy()
    llm = serve([spy], toy_options, drained, max_num_reqs=3, max_num_batched_tokens=4, async_scheduling=False)
    spy.calls.clear()
    asked = spying(logits_processors={"spy": {"add": 1e4}})
    outputs = llm.generate([[1, 2, 3, 4, 5, 6], [9]], [asked, spying()])
    llm.close()
    assert outputs[0].outputs[0].token_ids == [7, 7, 7]
    assert 7 not in outputs[1].outputs[0].token_ids
    slot = spy.calls[0][1]
    seen = [call for call in spy.calls if call[0] == "process"]
    assert seen == [("process", [slot], [6 + i], [last]) for i, last in enumerate([6, 7, 7])]
    assert [call for call in spy.calls if call[0] != "process"] == [("add", slot), "apply", ("remove", slot)]


def test_nobody_asks_and_nothing_is_called(toy_options: dict[str, Any], drained: Drained) -> None:
    spy = Spy()
    llm = serve([spy], toy_options, drained)
    llm.generate([[1, 2], [3]], [spying(), spying(temperature=1.0, seed=1, frequency_penalty=0.5)])
    llm.close()
    assert spy.calls == []


def test_they_run_after_penalties_and_before_temperature_in_the_order_of_loading(
    toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    class Doubles(Spy):
        def process(self, logits, rows):
            logits[:, 7] *= 2

    llm = serve([Spy("first"), Doubles("second")], toy_options, drained)
    prompt = [7, 2]
    params = spying(
        temperature=0.5,
        seed=1,
        top_k=3,
        logit_bias={7: 2.5},
        repetition_penalty=1.25,
        logits_processors={"second": {"add": 0.0}, "first": {"add": 0.5}},
        logprobs=3,
        logprobs_mode="processed",
        max_tokens=1,
    )
    want = toy_table.table[sum(t * weight(i) for i, t in enumerate(prompt)) % len(toy_table.table)].clone()
    want[7] += 2.5
    for token in prompt:
        want[token] = want[token] / 1.25 if want[token] > 0 else want[token] * 1.25
    want[7] = (want[7] + 0.5) * 2
    values, ids = torch.log_softmax(want.topk(3).values / 0.5, 0).tolist(), want.topk(3).indices.tolist()
    assert 7 in ids
    got = llm.generate(prompt, params)[0].outputs[0].logprobs[0]
    assert {id_: entry.logprob for id_, entry in got.items()} == pytest.approx(
        dict(zip(ids, values, strict=True)), abs=1e-5
    )


def test_a_seeded_stream_does_not_see_its_neighbours_processors(
    no_repeat: Any, toy_options: dict[str, Any], drained: Drained
) -> None:
    llm = drained(**toy_options, extensions=[no_repeat.NoRepeatExtension()])
    seeded = asking(10, temperature=0.9, seed=3, top_p=0.9)
    alone = llm.generate([4, 5, 6], seeded)[0].outputs[0].token_ids
    tokens = [4, 5, 6, *alone]
    assert all(token not in tokens[max(at - 10, 0) : at] for at, token in enumerate(tokens))
    for neighbours in ([asking(None)], [asking(3, seed=9), asking(None, temperature=1.0)]):
        prompts = [[i, 2] for i in range(len(neighbours))]
        outputs = llm.generate([*prompts, [4, 5, 6]], [*neighbours, seeded])
        assert outputs[-1].outputs[0].token_ids == alone


def test_a_row_left_without_an_id_fails_alone(toy_options: dict[str, Any], drained: Drained) -> None:
    spy = Spy()
    llm = serve([spy], toy_options, drained)
    bad = spying(logits_processors={"spy": {"add": float("nan")}})
    outputs = llm.generate([[1], [2]], [bad, spying()])
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"spx": {}}, r"request '.*': logits_processors asks for 'spx'.*installed: 'spy'"),
        ({"spy": {"add": 1}}, r"logits_processors\['spy'\]={'add': 1}: give add, a float"),
        ({"spy": {"crash": 1}}, r"logits_processors\['spy'\].*KeyError: 'missing'"),
    ],
)
def test_bad_names_and_options_are_refused_at_admission(
    asked: dict[str, Any], message: str, toy_options: dict[str, Any], drained: Drained
) -> None:
    spy = Spy()
    llm = serve([spy], toy_options, drained)
    with pytest.raises(RequestError, match=message):
        llm.generate([[1], [2]], [spying(), spying(logits_processors=asked)])
    assert spy.calls == []
    with pytest.raises(SchedulerOutputError, match="logits_processors"):
        _admit(llm.engine.runner, spying(logits_processors=asked))


def _admit(runner: ModelRunner, params: SamplingParams) -> None:
    runner.execute_model(
        SchedulerOutput(
            removed=[],
            new_requests=[NewRequest("r", 0, [1], 1, params, 1)],
            block_updates=[],
            slots=np.zeros(0, np.int32),
            num_scheduled_tokens=np.zeros(0, np.int32),
            num_computed_tokens=np.zeros(0, np.int32),
        )
    )


@pytest.mark.parametrize("asked", [["spy"], {"spy": 3}, {3: {}}, "spy", None])
def test_parameters_of_a_wrong_type_are_refused(asked: Any) -> None:
    with pytest.raises(RequestError, match=r"logits_processors=.* must map names to mappings of options"):
        SamplingParams(logits_processors=asked)


def test_what_is_no_processor_is_refused_at_load(toy_options: dict[str, Any]) -> None:
    class Nameless(Spy):
        name = ""

        def __init__(self) -> None:
            super().__init__("")

    options = {key: value for key, value in toy_options.items() if key not in ("model", "plugins")}
    config = RunnerConfig(model=toy_options["model"], **options)
    plugins = PluginManager(plugins=toy_options["plugins"])
    cases = (
        ([Spy], "is no LogitsProcessor"),
        ([Nameless()], "Nameless has no name"),
        ([Spy(), Spy()], "named 'spy'"),
    )
    for brought, message in cases:
        with pytest.raises(PluginHookError, match=message):
            ModelRunner(config, plugins=plugins, extensions=[Brings(*brought)])
