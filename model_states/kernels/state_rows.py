"""Which rows of a state pool a step reads and writes, by batch row.

    q = query_start_loc[b + 1] - query_start_loc[b],  e = seq_lens[b],  c = e - q
    source_rows[b] = block_table[b, (c - 1) // B]  if q > 0 and c > 0, else 0
    final_rows[b]  = block_table[b, (e - 1) // B]  if q > 0, else 0
    scratch_rows[b] = first_scratch + K idx_mapping[b]  if row b has more than one row of logits, else 0
    token_rows[t] = b for the tokens of row b, -1 for padding

Row 0 of a pool is zero for ever: the state before a request's first token, and nobody's to write. Several rows of
logits mean drafts (never the length of the row, which a prefill may have too); K is their number at most. block_table
int32 [num_rows, max_blocks], query_start_loc and cu_num_logits int32 [num_rows + 1], seq_lens and idx_mapping int32
[num_rows]; writes source_rows, final_rows, scratch_rows int32 [num_rows] and token_rows int32 [num_tokens].
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


def state_rows_torch(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    block_size: int,
    first_scratch: int,
    num_drafts: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """The formula above; `out` is (source_rows, final_rows, scratch_rows, token_rows)."""
    source_rows, final_rows, scratch_rows, token_rows = out
    query_len = query_start_loc.diff()
    is_real = query_len > 0
    computed = seq_lens - query_len
    last = block_table.shape[1] - 1

    def look_up(num_tokens: torch.Tensor) -> torch.Tensor:
        column = ((num_tokens - 1) // block_size).clamp(0, last).long()
        return torch.where(is_real & (num_tokens > 0), block_table.gather(1, column[:, None])[:, 0], 0)

    source_rows.copy_(look_up(computed))
    final_rows.copy_(look_up(seq_lens))
    has_drafts = (cu_num_logits.diff() > 1) & is_real
    scratch_rows.copy_(torch.where(has_drafts, first_scratch + idx_mapping * num_drafts, 0))
    tokens = torch.arange(len(token_rows), dtype=torch.int32, device=token_rows.device)
    rows = torch.searchsorted(query_start_loc, tokens, right=True) - 1
    token_rows.copy_(torch.where(tokens < query_start_loc[-1], rows, -1))


@triton.jit(do_not_specialize=["num_tokens", "first_scratch"])
def _state_rows_kernel(
    block_table,
    block_table_stride,
    query_start_loc,
    seq_lens,
    idx_mapping,
    cu_num_logits,
    source_rows,
    final_rows,
    scratch_rows,
    token_rows,
    num_tokens,
    first_scratch,
    num_drafts,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    # The program after the last row marks the padding tokens.
    is_row = row < tl.num_programs(0) - 1
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1, mask=is_row, other=num_tokens) - start
    if is_row:
        end = tl.load(seq_lens + row)
        computed = end - query_len
        table = block_table + row * block_table_stride
        is_real = query_len > 0
        source = tl.load(table + (computed - 1) // BLOCK_SIZE, mask=is_real & (computed > 0), other=0)
        final = tl.load(table + (end - 1) // BLOCK_SIZE, mask=is_real, other=0)
        tl.store(source_rows + row, source)
        tl.store(final_rows + row, final)
        num_logits = tl.load(cu_num_logits + row + 1) - tl.load(cu_num_logits + row)
        scratch = first_scratch + tl.load(idx_mapping + row) * num_drafts
        tl.store(scratch_rows + row, tl.where(is_real & (num_logits > 1), scratch, 0))
    value = tl.where(is_row, row, -1).to(tl.int32)
    for first in range(0, query_len, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(token_rows + start + offsets, value, mask=offsets < query_len)


def state_rows_triton(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    block_size: int,
    first_scratch: int,
    num_drafts: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Launch one program per row and one for the padding."""
    _state_rows_kernel[(len(seq_lens) + 1,)](
        block_table,
        block_table.stride(0),
        query_start_loc,
        seq_lens,
        idx_mapping,
        cu_num_logits,
        *out,
        len(out[3]),
        first_scratch,
        num_drafts,
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
    )


def state_rows(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    block_size: int,
    first_scratch: int,
    num_drafts: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write `out`: (source_rows, final_rows, scratch_rows, token_rows)."""
    op = state_rows_triton if use_triton(seq_lens) else state_rows_torch
    op(
        block_table,
        query_start_loc,
        seq_lens,
        idx_mapping,
        cu_num_logits,
        block_size,
        first_scratch,
        num_drafts,
        out,
    )
