"""Rejected drafts leave no trace in the state, for every number of them and every place (design, section 10), and a
chunk that is shaped like a step with drafts is none (field report C-03).
"""

from __future__ import annotations

import pytest
import torch
from mamba.forced_drafts import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_DRAFTS,
    OTHER,
    TOKENS,
    ForcedSteps,
    Row,
    assert_logits,
    check_rejected_drafts,
)
from mamba.states import recomputed_state


@pytest.fixture(scope="module", params=["bamba", "mamba"])
def forced(request, tiny) -> tuple[ForcedSteps, object]:
    model = tiny(request.param)
    return ForcedSteps(model.directory), model.model


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
def test_rejected_drafts_leave_no_trace(num_accepted: int, forced) -> None:
    check_rejected_drafts(*forced, recomputed_state, num_accepted, range(9, 18))


@pytest.mark.parametrize("name", ["mamba2", "jamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2"])
def test_rejected_drafts_leave_no_trace_elsewhere(name: str, tiny) -> None:
    """In the other architectures, with some accepted, all and none."""
    steps, model = ForcedSteps(tiny(name).directory), tiny(name).model
    for num_accepted in (0, 2, NUM_DRAFTS):
        check_rejected_drafts(steps, model, recomputed_state, num_accepted, (11, 14, 15, 16))


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
        assert_logits(torch.cat(got), model, prompt)
        # State blocks before the last one of a hit are not needed, and not held.
        b = Row(2, [*a.blocks[:num_blocks], 11, 12], OTHER[:7], edge)
        before = {name: _copy(steps, name) for name in steps.caches}
        got_b = steps.step(b)
        _assert_only(steps, before, {11, 12})
        assert_logits(got_b, model, [*prompt[:edge], *OTHER[:7]])


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
