"""Copy the known tokens of rows that are still in prefill into the input ids.

    p = num_computed_tokens[slot] + i,  slot = idx_mapping[b]
    input_ids[query_start_loc[b] + i] = all_token_ids[slot, p]   where 0 <= p < prefill_len[slot]

idx_mapping int32 [num_rows], query_start_loc int32 [num_rows + 1], num_computed_tokens and prefill_len int32
[num_slots], all_token_ids int32 [num_slots, max_model_len]; writes input_ids int64 [num_tokens]. Tokens at or
past prefill_len are left as they are (`merge_tokens` writes them); padding tokens get 0.
"""

from __future__ import annotations

import torch

from core_runner.kernels.token_rows import token_rows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


def prefill_tokens_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """The formula above, token by token."""
    rows, within_row, real = token_rows(query_start_loc, input_ids.numel())
    slots = idx_mapping[rows]
    position = num_computed_tokens[slots] + within_row
    known = real & (position >= 0) & (position < prefill_len[slots])
    token_ids = all_token_ids[slots, position.clamp(0, all_token_ids.shape[1] - 1)]
    input_ids.copy_(torch.where(known, token_ids, torch.where(real, input_ids, 0)))


@triton.jit(do_not_specialize=["num_tokens"])
def _prefill_tokens_kernel(
    idx_mapping,
    query_start_loc,
    num_computed_tokens,
    prefill_len,
    all_token_ids,
    all_token_ids_stride,
    input_ids,
    num_tokens,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    # The program after the last row writes the padding tokens.
    is_row = row < tl.num_programs(0) - 1
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1, mask=is_row, other=num_tokens) - start
    slot = tl.load(idx_mapping + row, mask=is_row, other=0)
    computed = tl.load(num_computed_tokens + slot, mask=is_row, other=0)
    known_len = tl.minimum(query_len, tl.load(prefill_len + slot) - computed)
    known_len = tl.where(is_row, known_len, 0)
    written_len = tl.where(is_row, known_len, query_len)
    history = all_token_ids + slot.to(tl.int64) * all_token_ids_stride
    for first in range(0, query_len, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        position = computed + offsets
        token_ids = tl.load(history + position, mask=(offsets < known_len) & (position >= 0), other=0)
        written = (offsets < written_len) & (position >= 0)
        tl.store(input_ids + start + offsets, token_ids.to(tl.int64), mask=written)


def prefill_tokens_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """Launch one program per row and one for the padding."""
    _prefill_tokens_kernel[(idx_mapping.numel() + 1,)](
        idx_mapping,
        query_start_loc,
        num_computed_tokens,
        prefill_len,
        all_token_ids,
        all_token_ids.stride(0),
        input_ids,
        input_ids.numel(),
        BLOCK=_BLOCK,
    )


def prefill_tokens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """Write `input_ids` of prefill rows and of padding."""
    op = prefill_tokens_triton if use_triton(input_ids) else prefill_tokens_torch
    op(idx_mapping, query_start_loc, num_computed_tokens, prefill_len, all_token_ids, input_ids)
