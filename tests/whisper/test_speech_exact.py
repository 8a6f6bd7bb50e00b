"""EXACT against transformers' generate: mixed, chunked, shared, preempted, aborted, cached and replayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.encoder_decoder import OPTIONS, SpeechModel, ask, encoder_runs, features
from support.reference import assert_exact
from support.replays import replayed_steps
from support.whole_steps import mixed_replays, ways_since

from core_runner import LLM, SamplingParams, completion_seed
from model_states.components.encoder_runs import EncoderRuns

if TYPE_CHECKING:
    from core_runner import RequestOutput

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
_draw = random.Random(5)
# (seed of the features, decoder prompt)
CASES = [
    (seed, [3, *(_draw.randrange(4, 211) for _ in range(length))])
    for seed, length in enumerate((0, 3, 9, 22, 5, 1))
]
MakeLLM = Callable[..., LLM]


def _ask_all(cases: Sequence[tuple[int, list[int]]]) -> list[dict[str, Any]]:
    return [ask(*case) for case in cases]


def _check(
    outputs: Sequence[RequestOutput], speech: SpeechModel, cases=CASES, max_tokens: int = MAX_TOKENS
) -> None:
    skipped = 0
    for (seed, prompt), output in zip(cases, outputs, strict=True):
        for completion in output.outputs:
            skipped += assert_exact(completion, speech.reference(seed, prompt, max_tokens), f"audio {seed}")
            assert completion.finish_reason == "length"
    assert skipped <= max_tokens


HIDDEN_STATES = {"cross_attention_cache": "hidden_states"}
OF_ENCODER = [
    {"encoder_ahead": 2},
    {"encoder_ahead": 1, "encoder_batch": 1, "encoder_entries": 5},
    HIDDEN_STATES,
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 7},
        *({"model_options": options} for options in OF_ENCODER),
    ],
    ids=str,
)
def test_equals_transformers_generate(
    options: dict[str, Any], speech: SpeechModel, speech_llm: MakeLLM
) -> None:
    llm = speech_llm(**options)
    before = encoder_runs(llm)
    for _ in ("cold", "warm"):
        _check(llm.generate(_ask_all(CASES), GREEDY), speech)
    assert encoder_runs(llm) - before >= len(CASES)


def test_requests_that_arrive_while_others_run(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    llm = speech_llm()
    first = llm.stream(_ask_all(CASES[:2]), GREEDY)
    early = [next(first) for _ in range(5)]
    _check(llm.generate(_ask_all(CASES[2:]), GREEDY), speech, CASES[2:])
    outputs = {d.request_index: d.output for d in [*early, *first] if d.output is not None}
    _check([outputs[0], outputs[1]], speech, CASES[:2])


@pytest.mark.parametrize("pause", [0, 32])
def test_slots_that_come_free_one_by_one_are_filled_several_at_once(
    pause: int, speech: SpeechModel, speech_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_states.components.cross_attention._PAUSE", pause)
    sizes: list[int] = []
    launch = EncoderRuns.launch
    monkeypatch.setattr(
        EncoderRuns, "launch", lambda runs, fills: (sizes.append(len(fills)), launch(runs, fills))[1]
    )
    llm = speech_llm(model_options={"encoder_batch": 8}, max_num_reqs=8, num_blocks=200)
    sizes.clear()
    lengths = [5 + 4 * i for i in range(8)]  # of the first eight
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in [*lengths, *lengths]
    ]
    outputs = llm.generate([ask(seed, [3, seed + 4]) for seed in range(16)], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == 2 * lengths
    assert sum(sizes) == 16
    # The first after a full batch at once; after that those that came free until few rows ran, or enough steps had.
    assert sizes == ([8, 1, 3, 4] if pause else [8, *[1] * 8])


@pytest.mark.parametrize("options", [{}, HIDDEN_STATES], ids=str)
def test_steps_are_replayed(options: dict[str, Any], speech: SpeechModel, speech_llm: MakeLLM) -> None:
    with replayed_steps():
        llm = speech_llm(model_options=options)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    before, mixed = llm.stats().step_ways, mixed_replays(llm)
    for _ in range(2):
        _check(llm.generate(_ask_all(CASES), greedy), speech)
        _check(llm.generate(_ask_all(CASES[::-1]), greedy), speech, CASES[::-1])
    ways = ways_since(llm, before)
    assert ways["step graph"] > sum(ways.values()) // 2
    assert "forward graph" not in ways
    assert mixed_replays(llm) > mixed


def test_equal_audio_is_encoded_once(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    llm = speech_llm(max_num_reqs=3)
    before = encoder_runs(llm)
    cases = [(7, prompt) for _, prompt in CASES]
    tensor, array = torch.from_numpy(features(7)), features(7).astype(np.float64)
    prompts = _ask_all(cases)
    prompts[1]["model_inputs"] = {"input_features": tensor}
    prompts[2]["model_inputs"] = {"input_features": array}
    _check(llm.generate(prompts, GREEDY), speech, cases)
    assert encoder_runs(llm) == before + 1
    named = [{"input_features": features(seed), "key": "clip"} for seed in (8, 8)]
    prompts = [{"prompt_token_ids": [3], "model_inputs": inputs} for inputs in named]
    _check(llm.generate(prompts, GREEDY), speech, [(8, [3])] * 2)
    assert encoder_runs(llm) == before + 2


@pytest.mark.parametrize("prefix", [False, True])
def test_several_completions_share_the_audio(prefix: bool, speech: SpeechModel, speech_llm: MakeLLM) -> None:
    llm = speech_llm(enable_prefix_caching=prefix)
    before = encoder_runs(llm)
    greedy = SamplingParams(temperature=0.0, n=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    _check(llm.generate(_ask_all(CASES[:3]), greedy), speech, CASES[:3])
    assert encoder_runs(llm) == before + 3
    sampled = SamplingParams(temperature=0.8, n=3, seed=4, max_tokens=8, ignore_eos=True)
    (together,) = llm.generate(ask(*CASES[3]), sampled)
    for index, completion in enumerate(together.outputs):
        alone = SamplingParams(temperature=0.8, seed=completion_seed(4, index), max_tokens=8, ignore_eos=True)
        assert llm.generate(ask(*CASES[3]), alone)[0].outputs[0].token_ids == completion.token_ids
    assert encoder_runs(llm) == before + 4


def test_preempted_in_the_middle(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    """What is preempted finds its entry again, and is what it would have been."""
    llm = speech_llm(enable_prefix_caching=False, max_num_reqs=2, num_blocks=13)
    before = encoder_runs(llm)
    cases = [CASES[3], CASES[2], CASES[4], CASES[1]]
    greedy = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, logprobs=1)
    _check(llm.generate(_ask_all(cases), greedy), speech, cases, 25)
    assert llm.stats().preemptions > 0
    assert encoder_runs(llm) - before == len(cases)


def test_preempted_and_forgotten(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    """One whose entry others wanted meanwhile has its audio encoded once more."""
    llm = speech_llm(policy="priority", max_num_reqs=1, num_blocks=20, model_options={"encoder_entries": 1})
    before, scheduler = encoder_runs(llm), llm.engine.scheduler
    stream = llm.stream([ask(*CASES[3])], GREEDY)
    deltas = [next(stream) for _ in range(3)]
    scheduler._preempt(scheduler.unfinished()[0])
    urgent = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1, priority=-1)
    _check(llm.generate([ask(*CASES[2])], urgent), speech, CASES[2:3])
    outputs = [delta.output for delta in [*deltas, *stream] if delta.output is not None]
    _check(outputs, speech, CASES[3:4])
    assert encoder_runs(llm) - before == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_fewer_entries_than_requests(is_async: bool, speech: SpeechModel, speech_llm: MakeLLM) -> None:
    llm = speech_llm(model_options={"encoder_entries": 2, "encoder_batch": 1}, async_scheduling=is_async)
    _check(llm.generate(_ask_all(CASES), GREEDY), speech)


def test_the_encoder_has_a_budget_of_its_own(
    speech: SpeechModel, speech_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = speech_llm(model_options={"encoder_batch": 2})
    encoder = llm.engine.runner.model_state.encoder
    stage, sizes, steps = encoder.stage, [], []

    def counted(inputs: Sequence[Any]) -> torch.Tensor:
        sizes.append(len(inputs))
        steps.append(llm.stats().steps)
        return stage(inputs)

    monkeypatch.setattr(encoder, "stage", counted)
    _check(llm.generate(_ask_all(CASES), GREEDY), speech)
    assert sum(sizes) == len(CASES)
    assert max(sizes) == 2
    assert len(set(steps)) == len(steps), "two batches in one step"


def test_the_encoder_runs_ahead_for_requests_that_wait(
    speech: SpeechModel, speech_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every slot taken, and for nobody twice, also where entries are scarce."""
    for num_entries, ahead in ((8, 4), (3, 1)):
        options = {"encoder_entries": num_entries, "encoder_ahead": 2}
        llm = speech_llm(max_num_reqs=2, model_options=options)
        runs = llm.engine.runner.model_state.cross_attention.runs
        launch, found = runs.launch, []

        def counted(fills: Sequence[Any], launch=launch, found=found, llm=llm) -> None:
            found.append((llm.stats().running, llm.stats().waiting, len(fills)))
            launch(fills)

        monkeypatch.setattr(runs, "launch", counted)
        _check(llm.generate(_ask_all(CASES), GREEDY), speech)
        assert found[0] == (2, 4, 2), "with nothing to hold up, in the step that lets them in"
        assert found[1] == (2, 4, ahead)
        assert sum(count for *_, count in found) == len(CASES)


class LateEvent:
    """Done when it was asked often enough, as on a device that takes its time."""

    def __init__(self, num_queries: int) -> None:
        self.left = num_queries

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def slow_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are known to be done some steps after they were launched."""
    launch = EncoderRuns.launch

    def launch_slowly(runs: EncoderRuns, fills: Sequence[Any]) -> None:
        launch(runs, fills)
        runs._running[-1] = runs._running[-1]._replace(done=LateEvent(9))

    monkeypatch.setattr(EncoderRuns, "launch", launch_slowly)


@pytest.mark.parametrize("num_entries", [1, 3, 9])
@pytest.mark.parametrize("is_async", [False, True])
def test_rows_go_on_while_the_encoder_runs(
    is_async: bool, num_entries: int, slow_encoder: None, speech: SpeechModel, speech_llm: MakeLLM
) -> None:
    options = {"encoder_entries": num_entries, "encoder_batch": 2, "encoder_ahead": 2}
    llm = speech_llm(max_num_reqs=3, async_scheduling=is_async, model_options=options)
    before = encoder_runs(llm)
    _check(llm.generate(_ask_all([*CASES, *CASES]), GREEDY), speech, [*CASES, *CASES])
    assert encoder_runs(llm) - before >= len(CASES)


def test_abort_while_the_encoder_runs(slow_encoder: None, speech: SpeechModel, speech_llm: MakeLLM) -> None:
    llm = speech_llm(max_num_reqs=2, model_options={"encoder_entries": 6, "encoder_ahead": 1})
    pool = llm.engine.runner.model_state.cross_attention.pool
    for _ in range(3):
        stream = llm.stream(_ask_all(CASES), GREEDY)
        next(stream)
        stream.close()
    _check(llm.generate(_ask_all(CASES), GREEDY), speech)
    assert pool.num_held == 0


def test_abort_lets_go_of_the_entry(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    llm = speech_llm(model_options={"encoder_entries": 4})
    stream = llm.stream(_ask_all(CASES), GREEDY)
    for _ in range(3):
        next(stream)
    stream.close()
    assert llm.engine.runner.model_state.cross_attention.pool.num_held == 0
    _check(llm.generate(_ask_all(CASES), GREEDY), speech)


def test_prefix_blocks_are_shared_by_audio_and_tokens(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    llm = speech_llm(enable_prefix_caching=True)
    prompt = CASES[3][1]
    hits = []
    for seed in (20, 21, 20, 21):
        before = llm.stats().cached_tokens
        _check(llm.generate([ask(seed, prompt)], GREEDY), speech, [(seed, prompt)])
        hits.append(llm.stats().cached_tokens - before)
    block_size = OPTIONS["block_size"]
    whole_blocks = (len(prompt) - 1) // block_size * block_size
    assert hits == [0, 0, whole_blocks, whole_blocks]


def test_a_failed_encoder_leaves_no_entry_behind(
    speech: SpeechModel, speech_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = speech_llm()
    encoder = llm.engine.runner.model_state.encoder
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "stage", lambda inputs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(_ask_all(CASES[:2]), GREEDY)
    _check(llm.generate(_ask_all(CASES), GREEDY), speech)
