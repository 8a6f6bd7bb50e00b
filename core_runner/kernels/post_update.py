"""Carry a step's sampled tokens into the slots, on the device, so that the next step can be built at once.

For every row b with query_len[b] > 0, slot = idx_mapping[b], n = min(num_sampled[b], the row's logits):

    all_token_ids[slot, total_len[slot] + j] = token_ids[cu_num_logits[b] + j]    j < n, inside max_model_len
    total_len[slot] = min(total_len[slot] + n, max_model_len)
    last_sampled_tokens[slot] = token_ids[cu_num_logits[b] + n - 1]               if n > 0
    num_computed_tokens[slot] += query_len[b] - num_rejected[b]

idx_mapping int32 [num_rows], query_start_loc and cu_num_logits int32 [num_rows + 1], token_ids [num_logits]
of any integer type, num_sampled and num_rejected int32, each [num_reqs] or longer; total_len,
last_sampled_tokens, num_computed_tokens int32 [num_slots] and all_token_ids int32 [num_slots, max_model_len]
are changed in place. The last slot is the null slot; rows of padding (query_len 0) change nothing that is
anybody's.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton


def post_update_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_logits: int,
) -> None:
    """The formula above; what is not written goes to the null slot, because a mask would synchronise."""
    num_slots, max_model_len = all_token_ids.shape
    num_reqs = min(num_sampled.numel(), num_rejected.numel(), idx_mapping.numel())
    num_sampled, num_rejected = num_sampled[:num_reqs], num_rejected[:num_reqs]
    query_len = (query_start_loc[1:] - query_start_loc[:-1])[:num_reqs]
    num_logits = (cu_num_logits[1:] - cu_num_logits[:-1])[:num_reqs]
    active = query_len > 0
    count = torch.minimum(num_sampled, num_logits).clamp(0, max_num_logits)
    slots = torch.where(active, idx_mapping[:num_reqs], num_slots - 1).long()
    total = total_len[slots]
    column = torch.arange(max_num_logits, device=total.device)
    if token_ids.numel() > 0:
        source = (cu_num_logits[:num_reqs, None] + column).clamp(max=token_ids.numel() - 1)
        sampled = token_ids[source].to(all_token_ids.dtype)
        place = total[:, None] + column
        written = (column < count[:, None]) & (place >= 0) & (place < max_model_len)
        target = torch.where(written, slots[:, None], num_slots - 1), torch.where(written, place, 0)
        all_token_ids[target] = torch.where(written, sampled, 0)
        last = sampled.gather(1, (count - 1).clamp(min=0)[:, None].long())[:, 0]
        last_sampled_tokens[slots] = torch.where(count > 0, last, last_sampled_tokens[slots])
    total_len[slots] = (total + count).clamp(max=max_model_len)
    num_computed_tokens.index_add_(0, slots, torch.where(active, query_len - num_rejected, 0))


@triton.jit
def _post_update_kernel(
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    token_ids,
    num_sampled,
    num_rejected,
    all_token_ids,
    all_token_ids_stride,
    total_len,
    last_sampled_tokens,
    num_computed_tokens,
    max_model_len,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    query_len = tl.load(query_start_loc + row + 1) - tl.load(query_start_loc + row)
    active = query_len > 0
    first = tl.load(cu_num_logits + row)
    num_logits = tl.load(cu_num_logits + row + 1) - first
    count = tl.minimum(tl.load(num_sampled + row), num_logits)
    count = tl.minimum(tl.maximum(count, 0), BLOCK)
    slot = tl.load(idx_mapping + row).to(tl.int64)
    total = tl.load(total_len + slot)

    offsets = tl.arange(0, BLOCK)
    sampled = tl.load(token_ids + first + offsets, mask=offsets < count, other=0).to(tl.int32)
    place = total + offsets
    inside = (offsets < count) & (place >= 0) & (place < max_model_len)
    tl.store(all_token_ids + slot * all_token_ids_stride + place, sampled, mask=inside)
    last = tl.load(token_ids + first + count - 1, mask=count > 0, other=0).to(tl.int32)
    tl.store(last_sampled_tokens + slot, last, mask=count > 0)
    tl.store(total_len + slot, tl.minimum(total + count, max_model_len), mask=active)

    computed = tl.load(num_computed_tokens + slot) + query_len - tl.load(num_rejected + row)
    tl.store(num_computed_tokens + slot, computed, mask=active)


def post_update_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_logits: int,
) -> None:
    """Launch one program per row."""
    num_reqs = min(num_sampled.numel(), num_rejected.numel(), idx_mapping.numel())
    _post_update_kernel[(num_reqs,)](
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        token_ids,
        num_sampled,
        num_rejected,
        all_token_ids,
        all_token_ids.stride(0),
        total_len,
        last_sampled_tokens,
        num_computed_tokens,
        all_token_ids.shape[1],
        BLOCK=1 << (max_num_logits - 1).bit_length(),
    )


def post_update(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_logits: int,
) -> None:
    """Change the slots' arrays in place; `max_num_logits` is K + 1, the most logits of one row."""
    op = post_update_triton if use_triton(total_len) else post_update_torch
    op(
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        token_ids,
        num_sampled,
        num_rejected,
        all_token_ids,
        total_len,
        last_sampled_tokens,
        num_computed_tokens,
        max_num_logits,
    )
