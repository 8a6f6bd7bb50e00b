"""How a scan walks the tokens of a batch row and where it leaves its state; `RecurrentStep.chunks` as Triton code.

Chunk k of a row that has computed c tokens and reaches e holds positions [max(c, u K), min(e, (u + 1) K)), with
u = c // K + k. K is the scan's chunk, no longer than a block, or 1 for a row with drafts.
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
