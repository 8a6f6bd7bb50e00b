"""`rope_write`: Triton equals the torch twin, and the twin the operations of separate modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model_states.kernels import rope_write
from model_states.kernels.add_norm import RMSNorm, rms_norm_torch
from model_states.kernels.rope_write import HeadLayout, Rotary

POISON = 7777.0
NUM_TOKENS, NUM_BLOCKS, BLOCK_SIZE = 5, 4, 3
SLOTS = [4, -1, 9, 3, -1]


def _case(
    dtype: torch.dtype,
    device: torch.device,
    heads: HeadLayout,
    rotary_dim: int,
    positions: bool,
    **options: Any,
) -> tuple[Any, ...]:
    """(qkv, heads, q_norm, k_norm, rotary, slot_mapping) with garbage in padding tokens."""
    torch.manual_seed(3)
    wide = torch.randn(NUM_TOKENS, sum(heads.sizes) + 7, device=device).to(dtype)
    wide[1] = POISON
    norms = [None, None]
    if options.get("norms"):
        weights = torch.randn(2, heads.head_size, device=device)
        norms = [RMSNorm(weights[0].to(dtype), 1e-5, True), RMSNorm(weights[1], 1e-6, False)]
    rotary = None
    if rotary_dim:
        rows = 40 if positions else NUM_TOKENS
        angles = torch.randn(rows, rotary_dim // 2, device=device)
        at = torch.tensor([39, 0, 7, 8, 0], device=device) if positions else None
        tables = torch.float32 if options.get("wide_tables") else dtype
        rotary = Rotary(
            angles.cos().to(tables), angles.sin().to(tables), at, options.get("interleaved", False)
        )
    slot_mapping = torch.tensor(SLOTS, device=device)
    return wide[:, : sum(heads.sizes)], heads, *norms, rotary, slot_mapping


def _run(op: Any, case: tuple[Any, ...], *shape: Any) -> list[torch.Tensor]:
    qkv, heads, q_norm, k_norm, rotary, slot_mapping = case
    qkv = qkv.clone()
    caches = [
        torch.full((NUM_BLOCKS, BLOCK_SIZE, heads.num_kv_heads, size), POISON, dtype=qkv.dtype).to(qkv.device)
        for size in (heads.head_size, heads.head_size_v)
    ]
    op(qkv, heads, q_norm, k_norm, rotary, *caches, slot_mapping, *shape)
    # The null block is nobody's, and so is what is left of the keys and values in qkv.
    return [qkv[:, : heads.sizes[0]], *(cache[1:] for cache in caches)]


@pytest.mark.parametrize(
    ("heads", "rotary_dim", "options"),
    [
        (HeadLayout(4, 2, 16, 16), 16, {"norms": True}),
        (HeadLayout(3, 1, 10, 6), 10, {}),
        (HeadLayout(3, 3, 12, 12), 6, {"norms": True, "positions": True}),
        (HeadLayout(4, 2, 8, 8), 4, {"interleaved": True, "positions": True, "wide_tables": True}),
        (HeadLayout(5, 5, 14, 14), 0, {"norms": True}),
        (HeadLayout(2, 1, 6, 10), 0, {}),
    ],
    ids=["norms", "plain", "partial", "interleaved", "no rope, norms", "no rope"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_twin(
    heads: HeadLayout, rotary_dim: int, options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    case = _case(dtype, device, heads, rotary_dim, **{"positions": False, **options})
    expected = _run(rope_write.rope_write_torch, case)
    for shape in ((), ((2, 1),)):
        got = _run(rope_write.rope_write_triton, case, *shape)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got, expected, **tolerance)
    written = (expected[1] != POISON).any(-1).any(-1).flatten().nonzero().flatten().tolist()
    assert written == sorted(slot - BLOCK_SIZE for slot in SLOTS if slot >= 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide_tables", [False, True])
def test_rounds_like_separate_operations(wide_tables: bool, dtype: torch.dtype, device: torch.device) -> None:
    heads = HeadLayout(4, 2, 16, 16)
    case = _case(dtype, device, heads, 16, False, norms=True, wide_tables=wide_tables)
    qkv, _, q_norm, _, rotary, _ = case
    q = rms_norm_torch(qkv[:, :64].reshape(NUM_TOKENS, 4, 16), q_norm)
    cos, sin = (torch.cat((table, table), -1)[:, None] for table in (rotary.cos, rotary.sin))
    turned = (q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin).to(dtype)
    got = _run(rope_write.rope_write, case)[0].view_as(turned)
    if dtype == torch.float32:
        torch.testing.assert_close(got, turned, rtol=1e-6, atol=1e-6)
    else:  # a norm's last bit may round the other way; a rounding left out shows in half of the numbers
        assert float((got != turned).float().mean()) < (0.02 if qkv.is_cuda else 1e-9)


def test_no_tokens(device: torch.device) -> None:
    case = _case(torch.float32, device, HeadLayout(2, 1, 4, 4), 4, False)
    empty = (case[0][:0], *case[1:-1], case[-1][:0])
    _run(rope_write.rope_write_triton, empty)
