"""Steps for the tests of scans: rows of every kind, and the plain recurrence that each scan must equal."""

from __future__ import annotations

import torch

from model_states.kernels.state_rows import state_rows_torch
from model_states.recurrent_step import RecurrentStep

# Pool rows 1 .. NUM_BLOCKS - 1 are blocks; NUM_DRAFTS scratch rows for each slot follow.
NUM_BLOCKS, NUM_DRAFTS = 60, 4
NUM_PADDING = 2


def make_step(
    rows: list[tuple[int, int, bool]], block_size: int, device: torch.device, *, max_blocks: int = 8
) -> RecurrentStep:
    """rows: (tokens computed, tokens of the step, whether it holds drafts) of each row; padding rows follow."""
    int32 = {"dtype": torch.int32, "device": device}
    lengths = torch.tensor([q for _, q, _ in rows] + [0] * NUM_PADDING)
    logits = torch.tensor([q if drafts else 1 for _, q, drafts in rows] + [0] * NUM_PADDING)
    num_rows = len(lengths)
    zero = torch.zeros(1, dtype=torch.int64)
    table = torch.zeros(num_rows, max_blocks, **int32)
    ids = torch.arange(1, NUM_BLOCKS, **int32)
    for b, (computed, count, _) in enumerate(rows):
        used = -(-(computed + count) // block_size)
        table[b, :used], ids = ids[:used], ids[used:]
    # Garbage that no length covers.
    table[len(rows) :] = 7
    seq_lens = torch.tensor([c + q if q else 0 for c, q, _ in rows] + [0] * NUM_PADDING, **int32)
    query_start_loc = torch.cat([zero, lengths.cumsum(0)]).to(**int32)
    num_tokens = int(lengths.sum()) + NUM_PADDING
    is_decode = all(q == 1 for _, q, _ in rows)
    out = tuple(torch.zeros(n, **int32) for n in (num_rows, num_rows, num_rows, num_tokens))
    cu_num_logits = torch.cat([zero, logits.cumsum(0)]).to(**int32)
    slots = torch.arange(num_rows, **int32)
    state_rows_torch(
        table, query_start_loc, seq_lens, slots, cu_num_logits, block_size, NUM_BLOCKS, NUM_DRAFTS, out
    )
    return RecurrentStep(query_start_loc, seq_lens, table, block_size, *out, is_decode)


def make_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A pool of noise, with row 0 zero."""
    pool = torch.randn(NUM_BLOCKS + 16 * NUM_DRAFTS, *shape, device=device).to(dtype)
    pool[0] = 0
    return pool


def expected_states(step: RecurrentStep, advance) -> dict[int, torch.Tensor]:
    """Pool row -> state, by the rule of `RecurrentStep`: advance(source row, tokens) is the state after them."""
    wanted = {}
    starts = step.query_start_loc.tolist()
    for b, end in enumerate(step.seq_lens.tolist()):
        start, stop = starts[b], starts[b + 1]
        for token in range(start, stop):
            position = end - (stop - token) + 1
            source, tokens = int(step.source_rows[b]), range(start, token + 1)
            if position == end:
                wanted[int(step.final_rows[b])] = advance(source, tokens)
                continue
            if position % step.block_size == 0:
                wanted[int(step.block_table[b, position // step.block_size - 1])] = advance(source, tokens)
            if int(step.scratch_rows[b]):
                wanted[int(step.scratch_rows[b]) + token - start] = advance(source, tokens)
    return wanted


# (block size, rows): prefills from nothing and warm, chunks shorter than a convolution, ends at and across blocks.
MIXED = [
    (16, [(0, 1, False), (0, 37, False), (16, 1, False), (15, 3, False), (17, 2, False), (31, 33, False)]),
    (4, [(3, 1, False), (4, 4, False), (5, 5, True), (7, 3, True), (0, 2, False), (11, 2, False)]),
    (64, [(60, 9, False), (0, 130, False), (63, 1, False)]),
]
DECODE = (16, [(0, 1, False), (16, 1, False), (15, 1, False), (40, 1, False)])
