"""`TranscriptionRules` forbid what transformers' processors forbid, row by row and through the engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drained import Drained
from support.encoder_decoder import OPTIONS, VOCAB_SIZE, ask, features, reference, save_speech_model
from support.reference import assert_wholly_exact
from transformers import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from core_runner import LLM, SamplingParams
from core_runner.errors import RequestError

# <|notimestamps|> is 120; ids from 121 on are timestamps.
GENERATION: dict[str, Any] = {
    "no_timestamps_token_id": 120,
    "suppress_tokens": [5, 9, 60, 61],
    "begin_suppress_tokens": [7, 2],
    "max_initial_timestamp_index": 30,
    "eos_token_id": 2,
}
MAX_TOKENS = 20
PROMPTS = [[3], [3, 30, 31], [3, 130, 140, 31, 150], [3, *range(10, 26)]]


def _processors(model: Any, begin: int, timestamps: bool) -> list[Any]:
    """transformers' own, in its order."""
    config = model.generation_config
    processors = [
        SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin),
        SuppressTokensLogitsProcessor(config.suppress_tokens),
    ]
    return [*processors, WhisperTimeStampLogitsProcessor(config, begin)] if timestamps else processors


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = tmp_path_factory.mktemp("timed")
    model = save_speech_model(directory, **GENERATION)
    return str(directory), model


@pytest.fixture
def timed_llm(timed: tuple[str, Any], drained: Drained) -> Callable[..., LLM]:
    return lambda **options: drained(timed[0], probe=ask(99, [3, 5, 6]), **{**OPTIONS, **options})


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("timestamps", [False, True])
def test_streams_equal_those_of_transformers(
    timestamps: bool, greedy: bool, timed: tuple[str, Any], timed_llm
) -> None:
    """Preempted ones too: the rules go on where they were. Greedy ones share some steps with others."""
    asked = {"whisper": {"timestamps": timestamps, "greedy": greedy}}
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logits_processors=asked)
    expected = [
        reference(
            timed[1],
            prompt,
            MAX_TOKENS,
            _processors(timed[1], len(prompt), timestamps),
            input_features=torch.from_numpy(features(seed))[None],
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    prompts = [ask(seed, prompt) for seed, prompt in enumerate(PROMPTS)]
    for options in ({}, {"num_blocks": 13, "max_num_reqs": 3}):
        llm = timed_llm(**options)
        # Beside one that asks for nothing.
        outputs = llm.generate(
            [*prompts, ask(9, [3])], [params] * len(prompts) + [SamplingParams(max_tokens=4)]
        )
        for output, reference_ in zip(outputs, expected, strict=False):
            assert output.outputs[0].token_ids == reference_.token_ids
        assert ("num_blocks" in options) == (llm.stats().preemptions > 0)


def test_greedy_steps_are_those_of_the_sampler(timed_llm) -> None:
    """Same tokens and log-probabilities, whatever the temperature says; in a graph of the whole step too."""
    llm = timed_llm(max_num_reqs=4)
    outputs = {}
    for greedy, temperature in ((False, 0.0), (True, 0.0), (True, 0.7)):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=MAX_TOKENS,
            logprobs=0,
            logprobs_mode="adjusted",
            logits_processors={"whisper": {"timestamps": True, "greedy": greedy}},
        )
        found = llm.generate([ask(seed, prompt) for seed, prompt in enumerate(PROMPTS)], params)
        outputs[greedy, temperature] = [output.outputs[0] for output in found]
    for plain, *others in zip(*outputs.values(), strict=True):
        values = [next(iter(ids.values())).logprob for ids in plain.logprobs]
        for other in others:
            assert other.token_ids == plain.token_ids
            assert [next(iter(ids.values())).logprob for ids in other.logprobs] == pytest.approx(
                values, abs=1e-5
            )
            assert all(next(iter(ids.values())).rank == 1 for ids in other.logprobs)


def test_one_id_alone_has_its_probability_among_all(timed_llm) -> None:
    """By the kernel of greedy rows, and by the sampler's own masks and log-probabilities."""
    values = []
    for processors, options in (
        ({"whisper": {"only": 119, "greedy": True}}, {}),
        ({"whisper": {"only": 119}}, {}),
        ({}, {"allowed_token_ids": [119]}),
    ):
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, logits_processors=processors, **options
        )
        found = timed_llm().generate([ask(seed, prompt) for seed, prompt in enumerate(PROMPTS)], params)
        assert [output.outputs[0].token_ids for output in found] == [[119]] * len(PROMPTS)
        values.append([output.outputs[0].logprobs[0][119].logprob for output in found])
    assert values[0] == pytest.approx(values[2], abs=1e-5)
    assert values[1] == pytest.approx(values[2], abs=1e-5)


def test_any_past_and_any_logits(timed: tuple[str, Any], timed_llm) -> None:
    """Random pasts of text and timestamps, random logits: the same ids are left."""
    from model_states.logits_processor import LogitsRows

    llm, draw = timed_llm(max_num_reqs=6), random.Random(2)
    (rules,) = llm.engine.runner.model_state.logits_processors(
        llm.engine.runner.model_state.config, VOCAB_SIZE
    )
    torch.manual_seed(4)
    for _ in range(30):
        begin, generated = draw.randrange(1, 5), draw.randrange(0, 6)
        pasts = []
        for slot in range(6):
            time = 121
            past = [draw.randrange(3, VOCAB_SIZE) for _ in range(begin)]
            for _ in range(generated):
                time = min(time + draw.randrange(0, 9), VOCAB_SIZE - 2)
                past.append(draw.choice([time, draw.randrange(10, 110)]))
            pasts.append(past)
            rules.add_request(slot, _Admission(past, begin), {"timestamps": True})
        rules.apply_staged_writes()
        tokens = torch.tensor(pasts)
        logits = torch.randn(6, VOCAB_SIZE) * draw.choice([1.0, 5.0])
        expected = logits
        for processor in _processors(timed[1], begin, True):
            expected = processor(tokens, expected)
        rows = LogitsRows(torch.arange(6), torch.full((6,), begin + generated), tokens[:, -1])
        rules.process(logits, rows)
        assert torch.equal(logits, expected)


class _Admission:
    def __init__(self, tokens: list[int], prompt_len: int) -> None:
        self.prefill_token_ids, self.prompt_len = tokens, prompt_len


def test_options_are_checked(timed_llm, tmp_path: Path, drained: Drained) -> None:
    llm = timed_llm()
    for options in ({"time": True}, {"timestamps": 1}, {"only": 3, "time": True}):
        params = SamplingParams(logits_processors={"whisper": options})
        with pytest.raises(RequestError, match="give timestamps, suppress and greedy, each"):
            llm.generate(ask(0, [3]), params)
    for only in (-1, VOCAB_SIZE, True, 3.0, [3]):
        params = SamplingParams(logits_processors={"whisper": {"only": only}})
        with pytest.raises(RequestError, match=rf"only=.* must be one of the {VOCAB_SIZE} ids"):
            llm.generate(ask(0, [3]), params)
    save_speech_model(tmp_path)
    plain = drained(str(tmp_path), probe=ask(99, [3, 5, 6]), **OPTIONS)
    params = SamplingParams(logits_processors={"whisper": {"timestamps": True}})
    with pytest.raises(RequestError, match="names no no_timestamps_token_id"):
        plain.generate(ask(0, [3]), params)
    both = SamplingParams(temperature=0.0, max_tokens=5, logits_processors={"whisper": {}})
    (output,) = plain.generate(ask(0, [3]), both)
    assert_wholly_exact(
        output.outputs[0],
        reference(_load(tmp_path), [3], 5, input_features=torch.from_numpy(features(0))[None]),
    )


def _load(directory: Path) -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(directory)
