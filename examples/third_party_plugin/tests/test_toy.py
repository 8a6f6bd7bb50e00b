"""The toy is served by the common runner and answers by its formula, however its work is cut up."""

from __future__ import annotations

import core_runner_toy
import pytest
from core_runner_toy.checkpoint import VOCAB_SIZE, expected_tokens, write_checkpoint

from core_runner import LLM, SamplingParams
from model_states import CapabilityError, PluginManager

PROMPTS = [[(7 * i + 3 * n) % VOCAB_SIZE for i in range(n)] for n in (1, 2, 3, 4, 5, 15, 16, 17, 33)]


@pytest.fixture(scope="module")
def plugins():
    """The plugin, by call where it is not installed."""
    installed = {row.name for row in PluginManager().plugins()}
    return [] if "toy" in installed else [core_runner_toy]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("toy"))


def generate(model, plugins, num_tokens, **options):
    llm = LLM(str(model), plugins=plugins, device="cpu", max_num_reqs=4, poison=True, **options)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=num_tokens))
    return [list(output.outputs[0].token_ids) for output in outputs], llm.stats()


CUTS = {
    "whole prompts": {},
    "one token at a time": {"max_num_batched_tokens": 4, "async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 7},
    "small blocks": {"block_size": 4, "max_num_batched_tokens": 9},
}


@pytest.mark.parametrize("cut", CUTS)
def test_answers_follow_the_formula(model, plugins, cut):
    tokens, _ = generate(model, plugins, 20, **CUTS[cut])
    assert tokens == [expected_tokens(prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_answers_survive_preemption(model, plugins, async_scheduling):
    tokens, stats = generate(
        model,
        plugins,
        40,
        num_blocks=8,
        max_model_len=80,
        max_num_batched_tokens=16,
        async_scheduling=async_scheduling,
    )
    assert tokens == [expected_tokens(prompt, 40) for prompt in PROMPTS]
    assert stats.preemptions > 0
    assert stats.free_blocks == stats.num_blocks


def test_prefix_caching_is_refused_when_asked_for(model, plugins):
    with pytest.raises(CapabilityError, match="'toy'"):
        LLM(str(model), plugins=plugins, device="cpu", enable_prefix_caching=True)


def test_formula_by_hand():
    # running: 2 -> 5*2+10=20 -> 5*20+20=120-97=23; nothing lies three tokens back.
    assert expected_tokens([10, 20], 1) == [23]
    # 3 -> 25 -> 145-97=48 -> (240+30)-194=76; then (5*76+76)-388=68, and the token three before is 10.
    assert expected_tokens([10, 20, 30], 2) == [76, 78]
