"""Where in the paged cache each token's keys and values go.

    c = positions[t] // block_size,  b = the batch row of token t
    slot_mapping[t] = block_table[b, c] * block_size + positions[t] % block_size

block_table int32 [num_rows, max_blocks] by batch row, query_start_loc int32 [num_rows + 1], positions int64
[num_tokens]; writes slot_mapping int64 [num_tokens]: -1 for padding tokens and for a position that no column
of the table covers.
"""

from __future__ import annotations

import torch

from core_runner.kernels.token_rows import token_rows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


def slot_mapping_torch(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
) -> None:
    """The formula above, token by token."""
    rows, _, real = token_rows(query_start_loc, positions.numel())
    column = positions // block_size
    covered = real & (positions >= 0) & (column < block_table.shape[1])
    block = block_table[rows, column.clamp(0, block_table.shape[1] - 1)].long()
    slot_mapping.copy_(torch.where(covered, block * block_size + positions % block_size, -1))


@triton.jit(do_not_specialize=["num_tokens"])
def _slot_mapping_kernel(
    block_table,
    block_table_stride,
    query_start_loc,
    positions,
    slot_mapping,
    num_tokens,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    # The program after the last row writes the padding tokens.
    is_row = row < tl.num_programs(0) - 1
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1, mask=is_row, other=num_tokens) - start
    real_len = tl.where(is_row, query_len, 0)
    for first in range(0, query_len, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        position = tl.load(positions + start + offsets, mask=offsets < real_len, other=-1)
        column = position // BLOCK_SIZE
        covered = (position >= 0) & (column < max_blocks)
        block = tl.load(block_table + row * block_table_stride + column, mask=covered, other=0).to(tl.int64)
        value = tl.where(covered, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mapping + start + offsets, value, mask=offsets < query_len)


def slot_mapping_triton(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
) -> None:
    """Launch one program per row and one for the padding."""
    _slot_mapping_kernel[(block_table.shape[0] + 1,)](
        block_table,
        block_table.stride(0),
        query_start_loc,
        positions,
        slot_mapping,
        positions.numel(),
        block_table.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
    )


def compute_slot_mapping(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
) -> None:
    """Write `slot_mapping`."""
    op = slot_mapping_triton if use_triton(slot_mapping) else slot_mapping_torch
    op(block_table, query_start_loc, positions, block_size, slot_mapping)
