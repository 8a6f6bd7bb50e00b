"""Write new keys and values into a paged cache.

For every token t with slot = slot_mapping[t] >= 0 and every kv head h:

    key_cache[slot // block_size, slot % block_size, h]   = key[t, h]
    value_cache[slot // block_size, slot % block_size, h] = value[t, h]

key [num_tokens, num_kv_heads, head_size] and value [num_tokens, num_kv_heads, head_size_v], last axis
contiguous; caches [num_blocks, block_size, num_kv_heads, head_size(_v)], contiguous; slot_mapping int64
[num_tokens], -1 for padding. Values are cast to the cache's dtype. Without a value (None) the key alone is
written.
"""

from __future__ import annotations

import torch

from model_states.attention.torch_backend import write_cache_torch
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 2048  # elements of key or value that a program moves


@triton.jit
def _write_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < NUM_KV_HEADS) & (d < HEAD_SIZE)
    moved = tl.load(key + token * key_token_stride + heads * key_head_stride + d, mask=inside)
    target = key_cache + (slot * NUM_KV_HEADS + heads) * HEAD_SIZE + d
    tl.store(target, moved.to(key_cache.dtype.element_ty), mask=inside)
    if HAS_VALUE:
        d = tl.arange(0, BLOCK_DV)[None, :]
        inside = (heads < NUM_KV_HEADS) & (d < HEAD_SIZE_V)
        moved = tl.load(value + token * value_token_stride + heads * value_head_stride + d, mask=inside)
        target = value_cache + (slot * NUM_KV_HEADS + heads) * HEAD_SIZE_V + d
        tl.store(target, moved.to(value_cache.dtype.element_ty), mask=inside)


def write_cache_triton(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Launch one program for every token and every few kv heads; shapes as above."""
    num_tokens, num_kv_heads, head_size = key.shape
    if not num_tokens:
        return
    values = key if value is None else value
    head_size_v = values.shape[2]
    block_d, block_dv = triton.next_power_of_2(head_size), triton.next_power_of_2(head_size_v)
    block_h = min(triton.next_power_of_2(num_kv_heads), max(1, _BLOCK // block_d))
    _write_cache_kernel[(num_tokens, triton.cdiv(num_kv_heads, block_h))](
        key,
        values,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        values.stride(0),
        values.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_SIZE_V=head_size_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        HAS_VALUE=value is not None,
        BLOCK_H=block_h,
        num_warps=4,
    )


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write every token whose slot is not negative."""
    op = write_cache_triton if use_triton(key) else write_cache_torch
    op(key, value, key_cache, value_cache, slot_mapping)
