"""Which slot and which token each row of logits belongs to.

For every row b and j < n, n = cu_num_logits[b + 1] - cu_num_logits[b], with e = cu_num_logits[b] + j:

    expanded_idx_mapping[e] = idx_mapping[b]
    expanded_local_pos[e] = j
    logits_indices[e] = query_start_loc[b + 1] - n + j        (the last n tokens of the row)

idx_mapping int32 [num_rows], query_start_loc and cu_num_logits int32 [num_rows + 1]; writes
expanded_idx_mapping and expanded_local_pos int32 [capacity] and logits_indices int64 [capacity]. What lies
past cu_num_logits[-1] is padding: the null slot, 0 and token 0.
"""

from __future__ import annotations

import torch

from core_runner.kernels.token_rows import token_rows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 64


def expand_idx_mapping_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    logits_indices: torch.Tensor,
    null_slot: int,
) -> None:
    """The formula above, logits row by logits row."""
    rows, within_row, real = token_rows(cu_num_logits, logits_indices.numel())
    num_logits = (cu_num_logits[1:] - cu_num_logits[:-1])[rows]
    expanded_idx_mapping.copy_(torch.where(real, idx_mapping[rows], null_slot))
    expanded_local_pos.copy_(within_row)
    logits_indices.copy_(torch.where(real, query_start_loc[rows + 1] - num_logits + within_row, 0))


@triton.jit(do_not_specialize=["capacity", "null_slot"])
def _expand_idx_mapping_kernel(
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    expanded_idx_mapping,
    expanded_local_pos,
    logits_indices,
    capacity,
    null_slot,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    # The program after the last row writes the padding.
    is_row = row < tl.num_programs(0) - 1
    start = tl.load(cu_num_logits + row)
    num_logits = tl.load(cu_num_logits + row + 1, mask=is_row, other=capacity) - start
    slot = tl.load(idx_mapping + row, mask=is_row, other=0)
    slot = tl.where(is_row, slot, null_slot)
    first_token = tl.load(query_start_loc + row + 1, mask=is_row, other=0) - num_logits
    for first in range(0, num_logits, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < num_logits
        token = tl.where(is_row, first_token + offsets, 0)
        tl.store(expanded_idx_mapping + start + offsets, slot, mask=inside)
        tl.store(expanded_local_pos + start + offsets, tl.where(is_row, offsets, 0), mask=inside)
        tl.store(logits_indices + start + offsets, token.to(tl.int64), mask=inside)


def expand_idx_mapping_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    logits_indices: torch.Tensor,
    null_slot: int,
) -> None:
    """Launch one program per row and one for the padding."""
    _expand_idx_mapping_kernel[(idx_mapping.numel() + 1,)](
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        expanded_idx_mapping,
        expanded_local_pos,
        logits_indices,
        logits_indices.numel(),
        null_slot,
        BLOCK=_BLOCK,
    )


def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    logits_indices: torch.Tensor,
    null_slot: int,
) -> None:
    """Write the three tensors that are indexed by logits row."""
    op = expand_idx_mapping_triton if use_triton(logits_indices) else expand_idx_mapping_torch
    op(
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        expanded_idx_mapping,
        expanded_local_pos,
        logits_indices,
        null_slot,
    )
