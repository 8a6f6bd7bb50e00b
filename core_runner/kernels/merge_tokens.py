"""Put the last sampled token and the drafts of decode rows into the input ids, without asking the host.

A row is in decode when num_computed_tokens[slot] >= prefill_len[slot], slot = idx_mapping[b]. For such a row

    input_ids[query_start_loc[b]] = last_sampled_tokens[slot]
    input_ids[query_start_loc[b] + 1 + j] = draft_tokens[slot, j]   for j < num_draft[b]
    num_draft[b] = cu_num_logits[b + 1] - cu_num_logits[b] - 1

idx_mapping int32 [num_rows], query_start_loc and cu_num_logits int32 [num_rows + 1], num_computed_tokens,
prefill_len and last_sampled_tokens int32 [num_slots], draft_tokens int32 [num_slots, max(K, 1)]; writes
input_ids int64 [num_tokens]. Rows in prefill and padding are left as they are.
"""

from __future__ import annotations

import torch

from core_runner.kernels.token_rows import token_rows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton


def merge_tokens_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_len: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """The formula above, token by token."""
    rows, within_row, real = token_rows(query_start_loc, input_ids.numel())
    slots = idx_mapping[rows]
    num_draft = (cu_num_logits[1:] - cu_num_logits[:-1] - 1).clamp(0, draft_tokens.shape[1])
    in_decode = num_computed_tokens[slots] >= prefill_len[slots]
    written = real & in_decode & (within_row <= num_draft[rows])
    drafts = draft_tokens[slots, (within_row - 1).clamp(0, draft_tokens.shape[1] - 1)]
    token_ids = torch.where(within_row == 0, last_sampled_tokens[slots], drafts)
    input_ids.copy_(torch.where(written, token_ids, input_ids))


@triton.jit
def _merge_tokens_kernel(
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    num_computed_tokens,
    prefill_len,
    last_sampled_tokens,
    draft_tokens,
    draft_tokens_stride,
    input_ids,
    MAX_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start
    num_draft = tl.load(cu_num_logits + row + 1) - tl.load(cu_num_logits + row) - 1
    written_len = tl.minimum(tl.minimum(tl.maximum(num_draft, 0), MAX_DRAFTS) + 1, query_len)
    slot = tl.load(idx_mapping + row).to(tl.int64)
    in_decode = tl.load(num_computed_tokens + slot) >= tl.load(prefill_len + slot)
    offsets = tl.arange(0, BLOCK)
    written = offsets < tl.where(in_decode, written_len, 0)
    drafts = draft_tokens + slot * draft_tokens_stride + offsets - 1
    token_ids = tl.load(drafts, mask=written & (offsets > 0), other=0)
    token_ids = tl.where(offsets == 0, tl.load(last_sampled_tokens + slot), token_ids)
    tl.store(input_ids + start + offsets, token_ids.to(tl.int64), mask=written)


def merge_tokens_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_len: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """Launch one program per row."""
    max_drafts = draft_tokens.shape[1]
    _merge_tokens_kernel[(idx_mapping.numel(),)](
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        num_computed_tokens,
        prefill_len,
        last_sampled_tokens,
        draft_tokens,
        draft_tokens.stride(0),
        input_ids,
        MAX_DRAFTS=max_drafts,
        BLOCK=1 << max_drafts.bit_length(),
    )


def merge_tokens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_len: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """Write `input_ids` of decode rows."""
    op = merge_tokens_triton if use_triton(input_ids) else merge_tokens_torch
    op(
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        num_computed_tokens,
        prefill_len,
        last_sampled_tokens,
        draft_tokens,
        input_ids,
    )
