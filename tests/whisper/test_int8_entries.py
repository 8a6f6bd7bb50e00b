"""Encoder outputs kept in 8 bits: half of the memory, nearly the same numbers, the same text of the embedded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_states_whisper
import pytest
from support.encoder_decoder import OPTIONS, SpeechModel, ask, encoder_runs

from core_runner import LLM, SamplingParams
from model_states import CapabilityError

MakeLLM = Callable[..., LLM]
INT8 = {"cross_attention_dtype": "int8"}
EXAMPLES = Path(model_states_whisper.__file__).parent / "embedded_model" / "examples"
CASES = [(seed, [3, *range(5, 5 + length)]) for seed, length in enumerate((0, 3, 9, 22, 5))]


def _pools(llm: LLM) -> list[Any]:
    return [pool for pools in llm.engine.runner.model_state.cross_attention.kept.pools for pool in pools]


def _num_bytes(llm: LLM) -> int:
    tensors = [tensor for pool in _pools(llm) for tensor in (pool.values, pool.scales) if tensor is not None]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def test_memory_is_a_fourth_of_fp32_and_half_of_16_bits(speech: SpeechModel) -> None:
    sizes = {}
    for dtype, options in (("float32", {}), ("bfloat16", {}), ("float32", INT8), ("bfloat16", INT8)):
        with LLM(speech.directory, **OPTIONS, dtype=dtype, model_options=options) as llm:
            sizes[dtype, bool(options)] = _num_bytes(llm)
            scales = sum(pool.scales.numel() * 4 for pool in _pools(llm)) if options else 0
            sizes[dtype, bool(options)] -= scales
    assert sizes["float32", False] == 2 * sizes["bfloat16", False] == 4 * sizes["float32", True]
    assert sizes["float32", True] == sizes["bfloat16", True]


def test_logits_are_nearly_the_same(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    """Of one token after each prompt; a tiny random model's logits differ by some 20 nats from one another."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, ignore_eos=True)
    prompts = [ask(*case) for case in CASES]
    exact, rounded = (llm.generate(prompts, params) for llm in (speech_llm(), speech_llm(model_options=INT8)))
    differences = []
    for one, other in zip(exact, rounded, strict=True):
        pair = [output.outputs[0].logprobs[0] for output in (one, other)]
        differences += [abs(pair[0][i].logprob - pair[1][i].logprob) for i in pair[0].keys() & pair[1].keys()]
    assert 0.0 < max(differences) < 0.03


def test_shared_preempted_and_batched_alike(speech_llm: MakeLLM) -> None:
    """What an entry holds depends on its own input alone."""
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    prompts = [ask(*case) for case in [*CASES, (CASES[0][0], CASES[2][1])]]
    alone = speech_llm(model_options=INT8, max_num_reqs=1)
    expected = [alone.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    llm = speech_llm(model_options=INT8, enable_prefix_caching=False, num_blocks=26)
    before = encoder_runs(llm)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert llm.stats().preemptions > 0
    assert encoder_runs(llm) - before == len(CASES)


@pytest.mark.parametrize("value", ["int4", 8])
def test_unknown_dtypes_are_refused(value: Any, speech: SpeechModel) -> None:
    with pytest.raises(CapabilityError, match=rf"cross_attention_dtype={value!r} must be 'auto' or 'int8'"):
        LLM(speech.directory, **OPTIONS, model_options={"cross_attention_dtype": value})


def test_the_embedded_model_says_the_same() -> None:
    said = json.loads((EXAMPLES / "recordings.json").read_text())
    with LLM("embedded:whisper", device="cpu", dtype="float32", model_options=INT8) as llm:
        transcripts = llm.transcribe([EXAMPLES / name for name in said], language="en")
    assert [transcript.text.strip() for transcript in transcripts] == list(said.values())
