"""EXACT: every architecture, prompts of many lengths in chunks of many sizes, against full recomputation."""

from __future__ import annotations

import random

import pytest
from linear.tiny import TINY
from support.drained import Drained
from support.reference import assert_exact

from core_runner import LLM, SamplingParams

LENGTHS = (1, 2, 3, 4, 5, 16, 63, 64, 65)
BUDGETS = (1, 2, 3, 4, 7, 64)
MAX_TOKENS = 4
_draw = random.Random(3)
PROMPTS = [[_draw.randrange(3, 211) for _ in range(length)] for length in (*LENGTHS, 300)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)


def _check(model, llm: LLM, prompts: list[list[int]]) -> None:
    skipped = 0
    for prompt, output in zip(prompts, llm.generate(prompts, PARAMS), strict=True):
        label = f"{model.name}, {len(prompt)} tokens"
        skipped += assert_exact(output.outputs[0], model.reference(prompt, MAX_TOKENS), label)
    assert skipped <= MAX_TOKENS


def _llm(drained: Drained, model, budget: int, **options) -> LLM:
    sizes = {"block_size": 4, "max_num_reqs": 4, "max_model_len": 320, "num_blocks": 400}
    options = {"model_options": {"state_block_size": 16}, **sizes, **options}
    return drained(model.directory, device="cpu", max_num_batched_tokens=budget, **options)


@pytest.mark.parametrize("name", TINY)
def test_exact(name: str, tiny, drained: Drained) -> None:
    """Chunks of up to 7 tokens shared by 4 requests: chunks shorter than the convolution, decodes among prefills."""
    model = tiny(name)
    _check(model, _llm(drained, model, 7), PROMPTS[:-1])


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "olmo_hybrid"])
def test_exact_in_one_chunk(name: str, tiny, drained: Drained) -> None:
    """With blocks of the default sizes."""
    model = tiny(name)
    _check(model, _llm(drained, model, 64, block_size=16, model_options={}), PROMPTS[5:])


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", TINY)
def test_exact_in_chunks_of_every_size(name: str, budget: int, tiny, drained: Drained) -> None:
    model = tiny(name)
    _check(model, _llm(drained, model, budget), PROMPTS)
