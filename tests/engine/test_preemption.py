"""Requests pushed out at a block edge come back whole (field report B-02)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support.drained import Drained
from support.phases import pushing_out
from support.reference import assert_exact

from core_runner import SamplingParams

if TYPE_CHECKING:
    from conftest import TinyModel

    from core_runner import RequestOutput

BLOCK_SIZE = 16
AT_LENGTHS = (15, 16, 17, 31, 32, 33)
MAX_TOKENS = 7


def _check(outputs: list[RequestOutput], prompts: list[list[int]], model: TinyModel, max_tokens: int) -> None:
    skipped = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        assert len(completion.logprobs) == len(completion.token_ids)
        skipped += assert_exact(
            completion, model.reference(prompt, max_tokens), f"prompt of {len(prompt)} tokens"
        )
        assert completion.finish_reason == "length"
    assert skipped == 0


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_preemption_at_a_block_edge(is_async: bool, prefix: bool, llama: TinyModel, drained: Drained) -> None:
    options = {"device": "cpu", "block_size": BLOCK_SIZE, "max_num_reqs": 4}
    llm = drained(
        llama.directory, enable_prefix_caching=prefix, async_scheduling=is_async, num_blocks=14, **options
    )
    draw = random.Random(11)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
    for length in AT_LENGTHS:
        before = llm.stats().preemptions
        # Fresh ids each time, so that without a hit of an earlier round all of it is computed again.
        prompts = [[draw.randrange(3, 211) for _ in range(length - 3)] for _ in range(2)]
        with pushing_out(llm.engine, length) as pushed_out:
            deltas = list(llm.stream(prompts, greedy))
        assert pushed_out.count(length) >= (1 if is_async else 2), f"{pushed_out}"
        assert llm.stats().preemptions - before >= 2
        last = sorted((d for d in deltas if d.output is not None), key=lambda delta: delta.request_index)
        outputs = [delta.output for delta in last]
        _check(outputs, prompts, llama, MAX_TOKENS)
        for index, output in enumerate(outputs):
            streamed = [token for d in deltas if d.request_index == index for token in d.token_ids]
            assert streamed == output.outputs[0].token_ids, "the stream has a gap or a repeat"


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_pool_too_small_for_all(is_async: bool, prefix: bool, llama: TinyModel, drained: Drained) -> None:
    """Blocks for about two of four requests: they take turns, and each is what it is alone."""
    llm = drained(
        llama.directory,
        device="cpu",
        block_size=BLOCK_SIZE,
        max_num_reqs=4,
        num_blocks=7,
        enable_prefix_caching=prefix,
        async_scheduling=is_async,
    )
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 211) for _ in range(length)] for length in (14, 15, 13, 16)]
    greedy = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True, logprobs=1)
    _check(llm.generate(prompts, greedy), prompts, llama, 21)
    assert llm.stats().preemptions > 0
