"""Encoder-decoder models on a GPU: tokens equal to transformers', in recorded steps that never wait for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_states_whisper.listening import Listener, Spoken
from support.drained import Drained
from support.encoder_decoder import ask, encoder_runs, features, reference, save_speech_model, save_text_model
from support.never_waiting import never_waiting
from support.reference import assert_exact
from support.tiny_words import PROMPT, save_word_model
from support.whole_steps import check_whole_steps, ways_since

from core_runner import LLM, SamplingParams

pytestmark = pytest.mark.gpu
MAX_TOKENS = 16
OPTIONS = {"device": "cuda", "block_size": 16, "max_num_reqs": 4, "max_num_batched_tokens": 23}
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
# (what is read, decoder prompt)
SPEECH = [(seed, [3, *range(5, 5 + length)]) for seed, length in enumerate((0, 3, 9, 22, 5))]
TEXTS = [([7 * i % 199 + 4 for i in range(length)], [3, 9, length]) for length in (1, 32, 7, 20, 11)]


def _read(text: list[int], prompt: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "model_inputs": {"encoder_input_ids": text}}


def _check(llm: LLM, prompts: list[Any], references: list[Any], label: str) -> None:
    """First with log-probabilities, behind graphs of the forward, then without, out of graphs of whole steps."""
    skipped = 0
    for _ in ("cold", "warm"):
        for output, expected in zip(llm.generate(prompts, GREEDY), references, strict=True):
            skipped += assert_exact(output.outputs[0], expected, label)
    assert skipped <= MAX_TOKENS
    assert llm.stats().step_ways["forward graph"] > 0
    check_whole_steps(llm, prompts, references, label)


def test_speech_equals_transformers_generate(tmp_path: Path, drained: Drained) -> None:
    model = save_speech_model(tmp_path)
    references = [
        reference(model, prompt, MAX_TOKENS, input_features=torch.from_numpy(features(seed))[None])
        for seed, prompt in SPEECH
    ]
    llm = drained(str(tmp_path), probe=ask(99, [3, 5]), dtype="float32", num_blocks=13, **OPTIONS)
    before = encoder_runs(llm)
    _check(llm, [ask(*case) for case in SPEECH], references, "speech")
    assert encoder_runs(llm) - before >= len(SPEECH)


def test_text_equals_transformers_generate(tmp_path: Path, drained: Drained) -> None:
    model = save_text_model(tmp_path)
    references = []
    for text, prompt in TEXTS:
        ids = torch.tensor([text])
        references.append(
            reference(model, prompt, MAX_TOKENS, input_ids=ids, attention_mask=torch.ones_like(ids))
        )
    llm = drained(str(tmp_path), probe=_read([9, 8, 7], [3, 5]), dtype="float32", **OPTIONS)
    _check(llm, [_read(*case) for case in TEXTS], references, "text")


def test_entries_of_8_bits_are_those_of_the_cpu(tmp_path: Path, drained: Drained) -> None:
    """One token after each prompt by both kernels' twins; then steps of one token, out of graphs."""
    save_speech_model(tmp_path)
    options = {**OPTIONS, "dtype": "float32", "model_options": {"cross_attention_dtype": "int8"}}
    first = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=20)
    prompts = [ask(*case) for case in SPEECH]
    by_device = []
    for device in ("cpu", "cuda"):
        llm = drained(str(tmp_path), probe=ask(99, [3, 5]), **{**options, "device": device})
        by_device.append([output.outputs[0] for output in llm.generate(prompts, first)])
    for expected, found in zip(*by_device, strict=True):
        assert found.token_ids == expected.token_ids
        for one, other in zip(expected.logprobs, found.logprobs, strict=True):
            for token in one.keys() & other.keys():
                # What is rounded to the other side moves a value by a step, 1/127 of the largest.
                assert abs(one[token].logprob - other[token].logprob) < 0.01
    plain = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    runs = [[output.outputs[0].token_ids for output in llm.generate(prompts, plain)] for _ in range(4)]
    assert runs[1:] == runs[:-1]
    assert llm.stats().step_ways["step graph"] > 0


def test_hidden_states_are_attended_over_as_keys_and_values_are(tmp_path: Path, drained: Drained) -> None:
    """Prompts of several tokens, steps of one, out of graphs; bf16 rounds in other places."""
    save_speech_model(tmp_path, sizes={"d_model": 256, "init_std": 0.1})
    options = {**OPTIONS, "dtype": "bfloat16", "poison": False}
    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    plain = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = [ask(*case) for case in SPEECH]
    found = []
    for cache in ("keys_values", "hidden_states"):
        llm = drained(
            str(tmp_path),
            probe=ask(99, [3, 5]),
            **{**options, "model_options": {"cross_attention_cache": cache}},
        )
        found.append([output.outputs[0].logprobs[0] for output in llm.generate(prompts, first)])
        runs = [[output.outputs[0].token_ids for output in llm.generate(prompts, plain)] for _ in range(4)]
        assert runs[1:] == runs[:-1]
        assert llm.stats().step_ways["step graph"] > 0
    for one, other in zip(*found, strict=True):
        shared = one.keys() & other.keys()
        assert len(shared) > 10
        assert max(abs(one[token].logprob - other[token].logprob) for token in shared) < 0.15


@pytest.mark.parametrize("cache", ["keys_values", "hidden_states"])
def test_steps_with_new_audio_never_synchronise(cache: str, tmp_path: Path, drained: Drained) -> None:
    generation = {"no_timestamps_token_id": 120, "suppress_tokens": [5, 9], "begin_suppress_tokens": [7]}
    save_speech_model(tmp_path, sizes={"d_model": 256, "init_std": 0.1}, **generation)
    options = {**OPTIONS, "dtype": "bfloat16", "model_options": {"cross_attention_cache": cache}}
    llm = drained(str(tmp_path), probe=ask(99, [3, 5]), poison=False, **options)
    rules = SamplingParams(temperature=0.0, max_tokens=8, logits_processors={"whisper": {"timestamps": True}})
    plain = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    count = 20

    def prompts(first: int) -> list[Any]:
        on_device = [torch.from_numpy(features(seed)).cuda() for seed in range(first, first + count)]
        asked = [ask(first + seed, [3, 4]) for seed in range(count)]
        for prompt, tensor in zip(asked[::2], on_device[::2], strict=True):
            prompt["model_inputs"] = {"input_features": tensor}
        return asked

    for first in (100, 200, 300):  # loading and recording kernels synchronises
        llm.generate(prompts(first), [plain] * (count // 2) + [rules] * (count // 2))
    runs, before, asked = encoder_runs(llm), llm.stats().step_ways, prompts(400)
    with never_waiting(llm.engine.runner) as counted:
        llm.generate(asked, [plain] * (count // 2) + [rules] * (count // 2))
    assert encoder_runs(llm) - runs == count
    ways = ways_since(llm, before)
    assert counted.steps == sum(ways.values()) > 30
    assert ways["step graph"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_listening_for_words_equals_that_of_the_cpu_and_never_synchronises(
    dtype: str, tmp_path: Path, drained: Drained
) -> None:
    save_word_model(tmp_path)
    texts = [[5], [0, 40, 41, 6, 90, 90], list(range(3, 45, 2))]
    spoken = [
        Spoken(
            prompt=PROMPT, text=text, model_inputs={"input_features": features(seed)}, num_positions=20 - seed
        )
        for seed, text in enumerate(texts)
    ]
    heard = []
    for device in ("cpu", "cuda"):
        kind = "float32" if device == "cpu" else dtype
        options = {**OPTIONS, "device": device, "dtype": kind}
        llm = drained(str(tmp_path), probe=ask(99, [3, 5]), poison=False, **options)
        llm.generate(ask(1, PROMPT), SamplingParams(temperature=0.0, max_tokens=2))  # one of three is kept
        listener = Listener(llm.engine.runner.model_state)
        list(listener.listen(spoken))  # kernels are compiled and pinned memory is taken
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            heard.append(list(listener.listen(spoken)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    close = {"atol": 1e-4, "rtol": 1e-3} if dtype == "float32" else {"atol": 0.1, "rtol": 0.1}
    for expected, found in zip(*heard, strict=True):
        torch.testing.assert_close(found.weights.cpu(), expected.weights, **close)
        torch.testing.assert_close(found.probabilities.cpu(), expected.probabilities, **close)
