"""How a call feeds its requests to the engine."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from support.drained import Drained
from support.toy_model import ToyTable

from core_runner import RequestError, SamplingParams

PROMPTS = [[1 + n % 49, 7] for n in range(100)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "queued"),
    [
        ({"max_num_batched_tokens": 64}, 64),
        ({"max_num_batched_tokens": 150}, 75),
        ({"max_num_batched_tokens": 2048}, 100),
        ({"max_num_batched_tokens": 64, "policy": "priority"}, 100),
        ({"max_num_batched_tokens": 64, "max_waiting": 10}, 10),
    ],
)
def test_the_first_step_comes_before_the_last_request_is_queued(
    options: dict[str, Any], queued: int, toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    """A step's worth of tokens is enough, but not of fewer than 64 requests, whose prompts may be cached."""
    llm = drained(**toy_options, max_num_reqs=8, **options)
    waiting: list[int] = []
    step = llm.engine.step

    def counting() -> Any:
        waiting.append(llm.stats().waiting)
        return step()

    with patch.object(llm.engine, "step", counting):
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [toy_table.greedy(p, 3) for p in PROMPTS]
    assert waiting[0] == queued


def test_a_bad_prompt_among_the_last_is_refused_before_anything_runs(
    toy_options: dict[str, Any], drained: Drained
) -> None:
    llm = drained(**toy_options, max_num_reqs=8, max_num_batched_tokens=64)
    steps = llm.stats().steps
    with pytest.raises(RequestError, match="token id 50 is outside the vocabulary"):
        llm.generate([*PROMPTS, [50]], GREEDY)
    assert llm.stats().steps == steps
