"""Positions of tokens and lengths of sequences, from what the device knows is computed.

    query_len[b] = query_start_loc[b + 1] - query_start_loc[b]
    seq_lens[b] = num_computed_tokens[idx_mapping[b]] + query_len[b], 0 where query_len[b] is 0
    positions[query_start_loc[b] + i] = num_computed_tokens[idx_mapping[b]] + i

idx_mapping int32 [num_rows], query_start_loc int32 [num_rows + 1], num_computed_tokens int32 [num_slots];
writes seq_lens int32 [num_rows] and positions int64 [num_tokens], where padding tokens get 0.
"""

from __future__ import annotations

import torch

from core_runner.kernels.token_rows import token_rows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


def positions_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """The formula above, token by token."""
    computed = num_computed_tokens[idx_mapping]
    query_len = query_start_loc[1:] - query_start_loc[:-1]
    seq_lens.copy_(torch.where(query_len > 0, computed + query_len, 0))
    rows, within_row, real = token_rows(query_start_loc, positions.numel())
    positions.copy_(torch.where(real, computed[rows] + within_row, 0))


@triton.jit(do_not_specialize=["num_tokens"])
def _positions_kernel(
    idx_mapping,
    query_start_loc,
    num_computed_tokens,
    positions,
    seq_lens,
    num_tokens,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    # The program after the last row writes the padding tokens.
    is_row = row < tl.num_programs(0) - 1
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1, mask=is_row, other=num_tokens) - start
    slot = tl.load(idx_mapping + row, mask=is_row, other=0)
    computed = tl.load(num_computed_tokens + slot)
    tl.store(seq_lens + row, tl.where(query_len > 0, computed + query_len, 0), mask=is_row)
    for first in range(0, query_len, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        value = tl.where(is_row, computed + offsets, 0)
        tl.store(positions + start + offsets, value.to(tl.int64), mask=offsets < query_len)


def positions_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Launch one program per row and one for the padding."""
    _positions_kernel[(idx_mapping.numel() + 1,)](
        idx_mapping,
        query_start_loc,
        num_computed_tokens,
        positions,
        seq_lens,
        positions.numel(),
        BLOCK=_BLOCK,
    )


def compute_positions(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Write `positions` and `seq_lens`."""
    op = positions_triton if use_triton(positions) else positions_torch
    op(idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens)
