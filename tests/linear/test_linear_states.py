"""States after every chunk equal transformers', in mixed steps too, and a step changes nobody else's.

transformers has no cache for models without any attention, so their states cannot be compared.
"""

from __future__ import annotations

import random

import pytest
from linear.states import check_states, pools, running, watch_rows
from linear.tiny import TINY
from support.drained import Drained

from core_runner import SamplingParams
from core_runner.request import Request

_draw = random.Random(7)
PROMPT_LEN, MAX_TOKENS = 70, 12
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
    watch_rows(llm.engine.runner)
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(Request(f"r{index}", prompt, GREEDY))  # type: ignore[arg-type]
    num_checked, last = 0, {}
    while llm.engine.has_unfinished:
        llm.engine.step()
        for slot, tokens in running(llm):
            # Every end of a prompt's chunks, and some of the decode.
            wanted = len(tokens) <= PROMPT_LEN or len(tokens) % 5 == 0
            if tokens and wanted and last.get(slot) != len(tokens):
                check_states(llm, model.model, slot, tokens)
                num_checked, last[slot] = num_checked + 1, len(tokens)
    assert num_checked >= 2 * (PROMPT_LEN // budget)
    for pool in pools(llm.engine.runner):
        assert not pool[0].any(), "the null row is not zero any more"


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("lfm2", 2),
        ("lfm2_biased", 7),
        ("lfm2_moe", 7),
        ("qwen3_next", 5),
        ("qwen3_next_deep", 7),
        ("qwen3_5", 16),
        ("qwen3_5_moe", 7),
        ("olmo_hybrid", 7),
    ],
)
def test_states_after_every_chunk(name: str, budget: int, tiny, drained: Drained) -> None:
    _run(tiny(name), drained, budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 16, 64, 70])
@pytest.mark.parametrize("name", [name for name in TINY if name != "qwen3_5_only_linear"])
def test_states_in_chunks_of_every_size(name: str, budget: int, tiny, drained: Drained) -> None:
    _run(tiny(name), drained, budget)
