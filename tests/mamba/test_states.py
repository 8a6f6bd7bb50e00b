"""States after every chunk equal transformers' (field report C-01), and a step changes nobody else's."""

from __future__ import annotations

import random

import pytest
from mamba.states import (
    assert_states_equal,
    held_state,
    pools,
    recomputed_state,
    running_rows,
    watch_rows,
)
from support.drained import Drained
from support.reference import assert_exact
from support.tiny_recurrent import TINY

from core_runner import SamplingParams
from core_runner.request import Request

_draw = random.Random(7)
PROMPT_LEN, MAX_TOKENS = 70, 20
PROMPTS = [[_draw.randrange(3, 211) for _ in range(length)] for length in (PROMPT_LEN, PROMPT_LEN - 9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def _run(model, drained: Drained, budget: int) -> None:
    """Two requests at once, step by step."""
    llm = drained(
        model.directory,
        device="cpu",
        block_size=16,
        max_num_reqs=3,
        max_model_len=128,
        num_blocks=30,
        max_num_batched_tokens=budget,
        async_scheduling=False,
        model_options={"state_block_size": 16},
    )
    runner, seen = llm.engine.runner, 0
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(Request(f"r{index}", prompt, GREEDY))  # type: ignore[arg-type]
    requests = list(llm.engine.scheduler.unfinished())
    watch_rows(runner)
    last: dict[int, int] = {}
    while llm.engine.has_unfinished:
        llm.engine.step()
        for slot, tokens in running_rows(llm):
            # Every length of a prompt's chunks, and some of the decode.
            if last.get(slot) == len(tokens) or (len(tokens) > PROMPT_LEN and len(tokens) % 7):
                continue
            last[slot] = len(tokens)
            want = recomputed_state(model.model, tokens)
            assert_states_equal(held_state(runner, slot, len(tokens)), want, f"{len(tokens)} tokens")
            seen += 1
    assert seen >= 2 * (PROMPT_LEN // budget)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        want = model.reference(prompt, MAX_TOKENS)
        got = SamplingOutcome(request.output_token_ids)
        assert assert_exact(got, want, f"{len(prompt)} tokens, budget {budget}") <= 2
    for pool in pools(runner):
        assert not pool[0].any(), "the null row is not zero any more"


class SamplingOutcome:
    """What `assert_exact` compares."""

    logprobs = None

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


@pytest.mark.parametrize("budget", [2, 5, 16])
@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_states_after_every_chunk(name: str, budget: int, tiny, drained: Drained) -> None:
    _run(tiny(name), drained, budget)


@pytest.mark.parametrize("name", [name for name in TINY if name not in ("mamba2", "jamba")])
def test_states_in_every_architecture(name: str, tiny, drained: Drained) -> None:
    _run(tiny(name), drained, 7)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 16, 64, 70])
@pytest.mark.parametrize("name", TINY)
def test_states_in_chunks_of_every_size(name: str, budget: int, tiny, drained: Drained) -> None:
    _run(tiny(name), drained, budget)
