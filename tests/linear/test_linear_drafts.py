"""Rejected drafts leave no trace in the state of a linear layer, for every number of them around a block's end."""

from __future__ import annotations

import random

import pytest
import torch
from mamba.forced_drafts import NUM_DRAFTS, ForcedSteps, Row
from model_states_linear.state import LinearState

_draw = random.Random(4)
TOKENS = [_draw.randrange(3, 211) for _ in range(80)]
WRONG = [_draw.randrange(3, 211) for _ in range(NUM_DRAFTS)]
OTHER = [_draw.randrange(3, 211) for _ in range(41)]


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next"])
def forced(request, tiny) -> tuple[ForcedSteps, object]:
    model = tiny(request.param)
    return ForcedSteps(model.directory, LinearState), model.model


@torch.no_grad()
def _expect(got: torch.Tensor, model, tokens: list[int]) -> None:
    """Logits of the last token, as transformers computes them from the beginning."""
    want = model(torch.tensor([tokens]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(got[-1:].log_softmax(-1), want.log_softmax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
def test_rejected_drafts_leave_no_trace(num_accepted: int, forced) -> None:
    steps, model = forced
    row, beside = Row(1, [3, 9, 4], [], 0), Row(2, [20, 21, 22], OTHER[:40], 0)
    for offset in (9, 12, 14, 15, 16, 17):
        # The drafts begin before, at and behind the end of a block of 16.
        row.tokens, row.num_computed, row.num_rejected = TOKENS[:offset], 0, None
        steps.step(row, beside)
        drafts = [*TOKENS[offset + 1 :][:num_accepted], *WRONG][:NUM_DRAFTS]
        row.tokens, row.num_computed = [TOKENS[offset], *drafts], offset
        row.num_rejected = NUM_DRAFTS - num_accepted
        steps.step(row, Row(2, beside.blocks, [OTHER[40]], 40))
        count = offset + 1 + num_accepted
        row.tokens, row.num_computed, row.num_rejected = [TOKENS[count]], count, None
        _expect(steps.step(row), model, TOKENS[: count + 1])
    _expect(steps.step(Row(2, beside.blocks, [7], 41)), model, [*OTHER, 7])
