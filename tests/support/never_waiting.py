"""Steps on a GPU that raise where torch would wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from support.drained import Drained
from support.recurrent_exact import TinyRecurrent
from support.whole_steps import ways_since

from core_runner import ModelRunner, SamplingParams


@dataclass
class Counted:
    """Steps that had rows, and those that had a grammar's mask."""

    steps: int = 0
    masks: int = 0


@contextmanager
def never_waiting(runner: ModelRunner) -> Iterator[Counted]:
    """While entered, a step of the runner is an error if it makes the host wait; reading its output is none."""
    counted = Counted()
    execute_model, sample_tokens = strict(runner.execute_model), strict(runner.sample_tokens)

    def counting(step: Any) -> None:
        counted.steps += step.num_reqs > 0
        counted.masks += step.grammar_bitmask is not None
        execute_model(step)

    with (
        patch.object(runner, "execute_model", counting),
        patch.object(runner, "sample_tokens", sample_tokens),
    ):
        yield counted


def strict(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in torch's debug mode for synchronising calls."""

    def call(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call


def check_never_waits(model: TinyRecurrent, logprobs: int | None, drained: Drained) -> None:
    """Steps of a model with recurrent state, prefills and decodes mixed, once their kernels are there."""
    options = {"max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 40, "poison": False}
    llm = drained(model.directory, device="cuda", model_options={"state_block_size": 16}, **options)
    prompts = [[5 + n % 7] * n for n in range(1, 64, 3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=logprobs)
    for _ in range(3):  # loading and recording kernels synchronises
        llm.generate(prompts, params)
    before = llm.stats().step_ways
    with never_waiting(llm.engine.runner) as counted:
        outputs = llm.generate(prompts, params)
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
    ways = ways_since(llm, before)
    assert counted.steps == sum(ways.values()) > 60
    assert ways["step graph" if logprobs is None else "forward graph"] > 50, ways
