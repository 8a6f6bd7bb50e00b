"""Rejected drafts leave no trace in the state, for every number of them and every place (design, section 10), and a
chunk that is shaped like a step with drafts is none (field report C-03).
"""

from __future__ import annotations

import random

import pytest
import torch
from mamba.forced_drafts import BLOCK_SIZE, NUM_BLOCKS, NUM_DRAFTS, ForcedSteps, Row
from mamba.states import assert_states_equal, recomputed_state

_draw = random.Random(4)
TOKENS = [_draw.randrange(3, 211) for _ in range(80)]
WRONG = [_draw.randrange(3, 211) for _ in range(NUM_DRAFTS)]
OTHER = [_draw.randrange(3, 211) for _ in range(80)]


@pytest.fixture(scope="module", params=["bamba", "mamba"])
def forced(request, tiny) -> tuple[ForcedSteps, object]:
    model = tiny(request.param)
    return ForcedSteps(model.directory), model.model


@torch.no_grad()
def _logits(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
def test_rejected_drafts_leave_no_trace(num_accepted: int, forced) -> None:
    steps, model = forced
    row = Row(1, [3, 9, 4], [], 0)
    beside = Row(2, [20, 21, 22, 23, 24], OTHER[:40], 0)
    for offset in range(9, 18):
        # The drafts begin before, at and behind the end of a block.
        row.tokens, row.num_computed, row.num_rejected = TOKENS[:offset], 0, None
        steps.step(row, beside)
        drafts = [*TOKENS[offset + 1 :][:num_accepted], *WRONG][:NUM_DRAFTS]
        row.tokens, row.num_computed = [TOKENS[offset], *drafts], offset
        row.num_rejected = NUM_DRAFTS - num_accepted
        steps.step(Row(2, beside.blocks, [OTHER[40]], 40), row)
        count = offset + 1 + num_accepted
        label = f"{count} tokens, {num_accepted} accepted"
        assert_states_equal(steps.state_of(row, count), recomputed_state(model, TOKENS[:count]), label)
        assert_states_equal(steps.state_of(beside, 41), recomputed_state(model, OTHER[:41]), label)
        # Two more steps, the first with drafts again: what was rejected is overwritten.
        row.tokens, row.num_computed = [*TOKENS[count : count + 2], *WRONG[2:]], count
        row.num_rejected = len(WRONG[2:])
        steps.step(row)
        row.tokens, row.num_computed, row.num_rejected = [TOKENS[count + 2]], count + 2, None
        got, want = steps.step(row), _logits(model, TOKENS[: count + 3])[-1:]
        torch.testing.assert_close(got.log_softmax(-1), want.log_softmax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_chunks_shaped_like_drafts(num_blocks: int, forced) -> None:
    """Field report C-03: after a step with drafts, A's last chunk has 1 + K tokens; B hits A's full blocks."""
    steps, model = forced
    edge = num_blocks * BLOCK_SIZE
    for tail in range(1, 13):
        drafting = Row(0, [30, 31], OTHER[:10], 0)
        steps.step(drafting)
        drafting.tokens, drafting.num_computed, drafting.num_rejected = OTHER[10:16], 10, 2
        steps.step(drafting)
        a = Row(1, [5, 6, 7, 8], [], 0)
        prompt = TOKENS[: edge + tail]
        got = []
        for first in range(0, len(prompt), NUM_DRAFTS + 1):
            a.tokens, a.num_computed = prompt[first : first + NUM_DRAFTS + 1], first
            before = {name: _copy(steps, name) for name in steps.caches}
            got.append(steps.step(a))
            _assert_only(steps, before, {*a.blocks})
        torch.testing.assert_close(
            torch.cat(got).log_softmax(-1), _logits(model, prompt).log_softmax(-1), rtol=0, atol=1e-4
        )
        # State blocks before the last one of a hit are not needed, and not held.
        b = Row(2, [*a.blocks[:num_blocks], 11, 12], OTHER[:7], edge)
        before = {name: _copy(steps, name) for name in steps.caches}
        got_b = steps.step(b)
        _assert_only(steps, before, {11, 12})
        want = _logits(model, [*prompt[:edge], *OTHER[:7]])[edge:]
        torch.testing.assert_close(got_b.log_softmax(-1), want.log_softmax(-1), rtol=0, atol=1e-4)


def _copy(steps: ForcedSteps, group: str) -> list[torch.Tensor]:
    return [t.clone() for layer in steps.caches[group].values() for t in layer.values()]


def _assert_only(steps: ForcedSteps, before: dict[str, list[torch.Tensor]], blocks: set[int]) -> None:
    for group, old in before.items():
        # The null block of a cache of keys is anybody's; a state's stays zero.
        first = 0 if group == steps.recurrent.group.name else 1
        others = [block for block in range(first, NUM_BLOCKS) if block not in blocks]
        for was, now in zip(old, _copy(steps, group), strict=True):
            assert torch.equal(was[others], now[others]), group
            assert now[others].isfinite().all()
