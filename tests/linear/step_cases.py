"""Steps for the tests of kernels: rows of every kind in a pool of noise, and what the component's rule leaves there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from model_states.kernels.state_rows import state_rows_torch
from model_states.recurrent_step import RecurrentStep

NUM_BLOCKS, NUM_DRAFTS, NUM_PADDING = 40, 4, 2

# (block size, (tokens computed, tokens of the step, whether it holds drafts) of each row): prefills from nothing and
# warm ones, ends at, before and across blocks, drafts, and steps of one token for every row.
CASES = [
    (16, [(0, 1, False), (0, 37, False), (16, 1, False), (15, 3, False), (31, 33, False)]),
    (4, [(3, 1, False), (4, 4, False), (5, 5, True), (7, 3, True), (11, 2, False)]),
    (64, [(60, 9, False), (0, 130, False), (63, 1, False)]),
    (16, [(0, 1, False), (16, 1, False), (15, 1, False), (40, 1, False)]),
]


def make_step(rows: list[tuple[int, int, bool]], block_size: int, device: torch.device) -> RecurrentStep:
    """The step of these rows and of padding rows, whose block tables are garbage."""
    computed, counts, drafts = (list(column) + [0] * NUM_PADDING for column in zip(*rows, strict=True))
    int32 = {"dtype": torch.int32, "device": device}
    num_rows, max_blocks = len(counts), 8
    table, next_block = torch.full((num_rows, max_blocks), 7, **int32), 1
    for row in range(len(rows)):
        num_blocks = -(-(computed[row] + counts[row]) // block_size)
        table[row, :num_blocks] = torch.arange(next_block, next_block + num_blocks)
        next_block += num_blocks
    assert next_block <= NUM_BLOCKS

    def starts(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], **int32).cumsum(0, dtype=torch.int32)

    query_start_loc = starts(counts)
    ends = torch.tensor([c + q if q else 0 for c, q in zip(computed, counts, strict=True)], **int32)
    logits = starts([q if d else 1 for q, d in zip(counts, drafts, strict=True)])
    sizes = (num_rows, num_rows, num_rows, sum(counts) + NUM_PADDING)
    out = tuple(torch.zeros(size, **int32) for size in sizes)
    slots = torch.arange(num_rows, **int32)
    state_rows_torch(table, query_start_loc, ends, slots, logits, block_size, NUM_BLOCKS, NUM_DRAFTS, out)
    is_decode = all(count == 1 for _, count, _ in rows)
    return RecurrentStep(query_start_loc, ends, table, block_size, *out, is_decode)


def make_pool(*shape: int, device: torch.device) -> torch.Tensor:
    """Noise, but for row 0."""
    pool = torch.randn(NUM_BLOCKS + 8 * NUM_DRAFTS, *shape, device=device)
    pool[0] = 0
    return pool


def walk(
    step: RecurrentStep, pool: torch.Tensor, advance: Callable[[torch.Tensor, int], torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor, list[int]]]:
    """(token, state after it, pool rows that must hold that state) token by token, by the rule of `RecurrentStep`."""
    starts = step.query_start_loc.tolist()
    for row, end in enumerate(step.seq_lens.tolist()):
        start, stop = starts[row : row + 2]
        state = pool[int(step.source_rows[row])].clone()
        for token in range(start, stop):
            state = advance(state, token)
            position, targets = end - (stop - token) + 1, []
            if position == end:
                targets.append(int(step.final_rows[row]))
            elif position % step.block_size == 0:
                targets.append(int(step.block_table[row, position // step.block_size - 1]))
            if position < end and int(step.scratch_rows[row]):
                targets.append(int(step.scratch_rows[row]) + token - start)
            yield token, state, targets
