"""Block tables of the batch: rows by slot become rows by batch index.

    out[b, c] = block_table[idx_mapping[b], c]

block_table int32 [num_slots, max_blocks], idx_mapping int32 [num_rows]; writes out int32 [num_rows,
max_blocks]. Padding rows name the null slot, whose row holds nothing but the null block. Columns past a row's
own blocks hold what an earlier owner of the slot left, valid block ids that lengths guard.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


def gather_block_tables_torch(
    block_table: torch.Tensor, idx_mapping: torch.Tensor, out: torch.Tensor
) -> None:
    """The formula above."""
    torch.index_select(block_table, 0, idx_mapping, out=out)


@triton.jit
def _gather_block_tables_kernel(
    block_table,
    block_table_stride,
    idx_mapping,
    out,
    out_stride,
    max_blocks,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(idx_mapping + row).to(tl.int64)
    inside = columns < max_blocks
    blocks = tl.load(block_table + slot * block_table_stride + columns, mask=inside)
    tl.store(out + row * out_stride + columns, blocks, mask=inside)


def gather_block_tables_triton(
    block_table: torch.Tensor, idx_mapping: torch.Tensor, out: torch.Tensor
) -> None:
    """Launch one program per row and `_BLOCK` columns."""
    max_blocks = block_table.shape[1]
    grid = (idx_mapping.numel(), triton.cdiv(max_blocks, _BLOCK))
    _gather_block_tables_kernel[grid](
        block_table, block_table.stride(0), idx_mapping, out, out.stride(0), max_blocks, BLOCK=_BLOCK
    )


def gather_block_tables(block_table: torch.Tensor, idx_mapping: torch.Tensor, out: torch.Tensor) -> None:
    """Write `out`."""
    op = gather_block_tables_triton if use_triton(out) else gather_block_tables_torch
    op(block_table, idx_mapping, out)
