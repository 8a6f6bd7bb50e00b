"""`state_rows` and `copy_rows`: the twins equal the rules said token by token, and Triton equals the twins."""

from __future__ import annotations

import pytest
import torch

from model_states.kernels import copy_rows, state_rows

BLOCK_SIZE, FIRST_SCRATCH, NUM_DRAFTS = 4, 50, 3
# (tokens computed, tokens of the step, rows of logits); three padding rows follow.
ROWS = [(0, 1, 1), (0, 9, 0), (4, 1, 1), (3, 2, 1), (8, 4, 4), (7, 4, 1), (12, 0, 0), (0, 4, 2)]


def _batch(device: torch.device) -> dict[str, torch.Tensor]:
    int32 = {"dtype": torch.int32, "device": device}
    lengths = torch.tensor([q for _, q, _ in ROWS] + [0] * 3)
    logits = torch.tensor([n for _, _, n in ROWS] + [0] * 3)
    zero = torch.zeros(1, dtype=torch.int64)
    seq_lens = [c + q if q else 0 for c, q, _ in ROWS] + [0] * 3
    generator = torch.Generator().manual_seed(1)
    return {
        "block_table": torch.randint(1, 50, (len(seq_lens), 5), generator=generator).to(**int32)[:, :4],
        "query_start_loc": torch.cat([zero, lengths.cumsum(0)]).to(**int32),
        "seq_lens": torch.tensor(seq_lens, **int32),
        "idx_mapping": torch.arange(len(seq_lens), **int32).flip(0),
        "cu_num_logits": torch.cat([zero, logits.cumsum(0)]).to(**int32),
    }


def _run(op, batch: dict[str, torch.Tensor], num_tokens: int) -> list[list[int]]:
    num_rows = len(batch["seq_lens"])
    out = [
        torch.full((n,), 777, dtype=torch.int32, device=batch["seq_lens"].device)
        for n in (num_rows, num_rows, num_rows, num_tokens)
    ]
    op(*batch.values(), BLOCK_SIZE, FIRST_SCRATCH, NUM_DRAFTS, tuple(out))
    return [tensor.tolist() for tensor in out]


@pytest.mark.parametrize("op", [state_rows.state_rows_torch, state_rows.state_rows_triton])
def test_rows_are_those_of_the_rules(op, device: torch.device) -> None:
    batch = _batch(device)
    table, slots = batch["block_table"].tolist(), batch["idx_mapping"].tolist()
    source, final, scratch, tokens = [], [], [], []
    for b, (c, q, n) in enumerate(ROWS):
        source.append(table[b][(c - 1) // BLOCK_SIZE] if c and q else 0)
        final.append(table[b][(c + q - 1) // BLOCK_SIZE] if q else 0)
        scratch.append(FIRST_SCRATCH + NUM_DRAFTS * slots[b] if n > 1 else 0)
        tokens += [b] * q
    nobody = [0] * 3
    want = [source + nobody, final + nobody, scratch + nobody, tokens + [-1] * 6]
    assert _run(op, batch, len(tokens) + 6) == want


@pytest.mark.parametrize("op", [copy_rows.copy_rows_torch, copy_rows.copy_rows_triton])
def test_copies_touch_their_targets_alone(op, device: torch.device) -> None:
    pool = torch.randn(9, 3, 5, device=device)
    want = pool.clone()
    source_rows = torch.tensor([3, 7, 8, -9], dtype=torch.int32, device=device)
    target_rows = torch.tensor([5, 0, 2, 0], dtype=torch.int32, device=device)
    want[5], want[2] = pool[3], pool[8]
    op(pool, source_rows, target_rows)
    torch.testing.assert_close(pool, want, rtol=0, atol=0)
