"""Prompts that the prefix cache holds wholly or to a block edge (field report B-01)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support.drained import Drained
from support.reference import assert_exact
from support.toy_model import Listener

from core_runner import SamplingParams

if TYPE_CHECKING:
    from conftest import TinyModel

    from core_runner import LLM, RequestOutput

MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)


def _prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 211) for _ in range(length)]


def _run(llm: LLM, model: TinyModel, *prompts: list[int]) -> list[RequestOutput]:
    outputs = llm.generate(list(prompts), GREEDY)
    skipped = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        skipped += assert_exact(
            output.outputs[0], model.reference(prompt, MAX_TOKENS), f"{len(prompt)} tokens"
        )
        assert output.num_cached_tokens < len(prompt)
    assert skipped == 0
    return outputs


@pytest.fixture
def llm(llama: TinyModel, drained: Drained) -> LLM:
    options = {"device": "cpu", "block_size": 16, "max_num_reqs": 8, "enable_prefix_caching": True}
    return drained(llama.directory, extensions=[Listener()], **options)


def test_repeated_prompts_hit_all_but_the_last_token(llm: LLM, llama: TinyModel) -> None:
    for length in (15, 16, 17, 32, 48):
        prompt = _prompt(length, seed=length)
        hits = [_run(llm, llama, prompt)[0].num_cached_tokens for _ in range(3)]
        # At least one token is computed, and only whole blocks are shared.
        assert hits == [0, *[(length - 1) // 16 * 16] * 2], f"{length} tokens"


def test_prefixes_that_end_at_a_block_edge(llm: LLM, llama: TinyModel) -> None:
    a = _prompt(48, seed=1)
    b, c = a[:32], [*a[:32], 99]
    _run(llm, llama, a)
    (of_b,) = _run(llm, llama, b)
    (of_c,) = _run(llm, llama, c)
    assert (of_b.num_cached_tokens, of_c.num_cached_tokens) == (16, 32)
    fresh = _prompt(40, seed=2)
    beside, uncached = _run(llm, llama, b, fresh)
    assert (beside.num_cached_tokens, uncached.num_cached_tokens) == (16, 0)
    # The chain behind the edge is whole: a longer prompt still hits all of A.
    (longer,) = _run(llm, llama, [*a, 5])
    assert longer.num_cached_tokens == 48


def test_salt_and_model_inputs_keep_blocks_apart(llm: LLM, llama: TinyModel) -> None:
    prompt = _prompt(33, seed=4)
    _run(llm, llama, prompt)
    salted = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, cache_salt="a")
    hits = [llm.generate(prompt, salted)[0].num_cached_tokens for _ in range(2)]
    with_inputs = {"prompt_token_ids": prompt, "model_inputs": {"audio": 0}}
    assert hits == [0, 32]
    assert llm.generate(with_inputs, GREEDY)[0].num_cached_tokens == 0
