"""`choose_token`: Triton equals the torch twin, and the twin the likeliest of what the rules leave."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from model_states_whisper.kernels.choose_token import (
    ALWAYS,
    AT_FIRST,
    Choice,
    ChoiceRows,
    ChoiceRules,
    allowed_torch,
    choose_token_torch,
    choose_token_triton,
)

VOCAB_SIZE, FIRST, END, MAX_LEN = 157, 121, 110, 13
ROWS = 9


def _rules(device: torch.device, **changes) -> ChoiceRules:
    flags = torch.zeros(VOCAB_SIZE, dtype=torch.uint8)
    flags[[5, 9, 60, 125]], flags[[7, 2]], flags[8] = ALWAYS, AT_FIRST, ALWAYS + AT_FIRST
    past = torch.randint(0, VOCAB_SIZE, (ROWS + 1, MAX_LEN), dtype=torch.int32)
    rules = torch.zeros(ROWS + 1, 4, dtype=torch.int32)
    given = ChoiceRules(past.to(device), rules.to(device), flags.to(device), VOCAB_SIZE, FIRST, END, 11)
    return replace(given, **changes)


def _draw(rules: ChoiceRules, draw: random.Random) -> ChoiceRows:
    """Rows of different slots with any past that the rules allow, in the order of neither slots nor tokens."""
    device = rules.past.device
    slots = torch.tensor(draw.sample(range(ROWS), ROWS), dtype=torch.int32)
    indices = torch.tensor(draw.sample(range(ROWS + 2), ROWS))
    positions, tokens = torch.full((ROWS + 2,), 999), torch.full((ROWS + 2,), 999)
    for slot, index in zip(slots.tolist(), indices.tolist(), strict=True):
        begin, time = draw.randrange(1, 4), FIRST
        past = [draw.randrange(VOCAB_SIZE) for _ in range(begin)]
        for _ in range(draw.randrange(MAX_LEN - begin)):
            time = min(time + draw.randrange(0, 9), VOCAB_SIZE - 1)
            past.append(draw.choice([time, time, draw.randrange(10, 110)]))
        rules.past[slot, : len(past) - 1] = torch.tensor(past[:-1], dtype=torch.int32)
        rules.rules[slot] = torch.tensor([begin, draw.randrange(2), draw.choice([0, 1, 1]), -1])
        positions[index], tokens[index] = len(past) - 1, past[-1]
    return ChoiceRows(*(values.to(device) for values in (slots, indices, positions, tokens)))


def _poisoned(device: torch.device) -> Choice:
    values = torch.full((ROWS,), 7.0, device=device)
    return Choice(values.to(torch.int64), values.bool(), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"most_initial": None}, {"first_timestamp": VOCAB_SIZE}])
def test_kernel_and_twin(dtype, changes, device) -> None:
    draw = random.Random(3)
    torch.manual_seed(5)
    chosen_times = 0
    for scale in (0.1, 1.0, 4.0, 30.0):
        rules = _rules(device, **changes)
        rows = _draw(rules, draw)
        if "first_timestamp" in changes:
            rules.rules[:, 2] = 0
        rules.rules[rows.slots[5].long(), 3] = 125
        logits = (scale * torch.randn(ROWS, VOCAB_SIZE + 3, device=device)).to(dtype)
        logits[:, VOCAB_SIZE:] = torch.nan  # padding
        logits[1, 30] = torch.nan
        logits[2] = -torch.inf
        logits[3, [20, 140]] = torch.inf
        others = replace(rules, past=rules.past.clone())
        outs = _poisoned(device), _poisoned(device)
        choose_token_torch(logits, rules, rows, outs[0])
        choose_token_triton(logits, others, rows, outs[1])
        assert torch.equal(rules.past, others.past)
        twin, kernel = outs
        assert torch.equal(twin.failed, kernel.failed)
        assert torch.equal(twin.token_ids, kernel.token_ids)
        torch.testing.assert_close(
            twin.values[~twin.failed], kernel.values[~twin.failed], rtol=1e-5, atol=1e-5
        )
        assert bool(twin.failed[2])
        assert not bool(twin.failed[4:].any())
        chosen_times += int((twin.token_ids >= FIRST).sum())
        x = logits[:, :VOCAB_SIZE].float()
        left = x.masked_fill(~allowed_torch(x, rules, rows), -torch.inf)[4:]
        assert torch.equal(left.argmax(1), twin.token_ids[4:])
        left[1] = x[5]  # of the one id that is named all others count too
        expected = left.log_softmax(1).gather(1, twin.token_ids[4:, None])[:, 0]
        torch.testing.assert_close(twin.values[4:], expected, rtol=1e-5, atol=1e-5)
        assert twin.token_ids[5] == 125
    assert chosen_times > 3
