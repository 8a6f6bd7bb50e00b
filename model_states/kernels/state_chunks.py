"""How a scan walks the tokens of a batch row and where it leaves its state; `RecurrentStep.chunks` as Triton code.

Chunk k of a row that has computed c tokens and reaches e holds positions [max(c, u K), min(e, (u + 1) K)), with
u = c // K + k. K is the scan's chunk, no longer than a block, or 1 for a row with drafts.

Kernels that take the chunks of all rows at once have a program for each slot: chunk k of a row is in its first slot +
k, and as lengths are known to the device alone, some slots have no tokens.
"""

from __future__ import annotations

from model_states.kernels.triton_import import tl, triton


@triton.jit
def row_chunks(computed, end, scratch, CHUNK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """K, and how many chunks the row has; `scratch` is the row's entry of scratch_rows."""
    unit = tl.where(scratch > 0, 1, CHUNK)
    return unit, (end - 1) // unit - computed // unit + 1


@triton.jit
def chunk_bounds(computed, end, unit, k) -> tuple[tl.tensor, tl.tensor]:
    """First position of chunk k, and the one after its last."""
    at = computed // unit + k
    return tl.maximum(at * unit, computed), tl.minimum((at + 1) * unit, end)


@triton.jit
def chunk_targets(
    computed, end, last, final, scratch, table, BLOCK_SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Pool rows for the state after position `last`: the row's own (final or scratch), and its block's; 0 is none.

    table: pointer to the row's block table.
    """
    within = last < end
    own = tl.where(within, tl.where(scratch > 0, scratch + last - computed - 1, 0), final)
    block = tl.load(table + last // BLOCK_SIZE - 1, mask=within & (last % BLOCK_SIZE == 0), other=0)
    return own.to(tl.int64), block.to(tl.int64)


def num_slots(num_tokens: int, num_rows: int, chunk: int) -> int:
    """Slots for any rows of so many tokens in all."""
    return num_tokens // chunk + 2 * num_rows


@triton.jit
def first_slot(start, row, CHUNK: tl.constexpr) -> tl.tensor:
    """Slot of a row's first chunk, from its first token: n tokens lie in at most n // CHUNK + 2 chunks."""
    return start // CHUNK + 2 * row


@triton.jit
def _row_of_slot(slot, query_start_loc, num_rows, CHUNK: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The last row whose first slot is not behind `slot`."""
    row = -1
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
        is_before = (first_slot(starts, rows, CHUNK) <= slot) & (rows < num_rows)
        row += tl.sum(is_before.to(tl.int32), 0)
    return row


@triton.jit
def chunk_of_slot(
    slot, query_start_loc, seq_lens, num_rows, CHUNK: tl.constexpr, LEAST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Row of a slot, its chunk k of that row, the chunk's first token, and its tokens: none where there is no chunk.

    LEAST: rows of fewer tokens have no chunks. Chunks are those of rows without drafts.
    """
    row = _row_of_slot(slot, query_start_loc, num_rows, CHUNK, 256)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    end = tl.load(seq_lens + row)
    k = slot - first_slot(start, row, CHUNK)
    first, last = chunk_bounds(end - num_tokens, end, CHUNK, k)
    return (
        row,
        k,
        (start + first - end + num_tokens).to(tl.int64),
        tl.where(num_tokens >= LEAST, last - first, 0),
    )
