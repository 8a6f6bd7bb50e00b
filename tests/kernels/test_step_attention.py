"""`step_attention`: Triton equals the torch twin, and the twin writes and attends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec
from model_states.kernels.step_attention import serves_step, step_attention_torch, step_attention_triton

HEADS = 3
LENGTHS = [1, 16, 17, 40, 2, 0, 0]  # the last two are padding


def _metadata(block_size: int, device: torch.device) -> AttentionMetadata:
    seq_lens = torch.tensor(LENGTHS, dtype=torch.int32)
    table = (torch.randperm(70)[:63] + 1).view(7, 9).to(torch.int32)
    last = (seq_lens - 1).clamp(min=0)
    blocks = table.gather(1, (last // block_size).long()[:, None])[:, 0]
    slots = torch.where(seq_lens > 0, blocks.long() * block_size + last % block_size, -1)
    starts = torch.tensor([0, 1, 2, 3, 4, 5, 5, 5], dtype=torch.int32)
    tensors = (starts, seq_lens, table, slots)
    return AttentionMetadata(*(tensor.to(device) for tensor in tensors), max_query_len=1, max_seq_len=45)


@pytest.mark.parametrize(("head_size", "block_size"), [(16, 5), (24, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_and_twin(head_size, block_size, dtype, device) -> None:
    torch.manual_seed(head_size)
    spec = AttentionSpec(HEADS, HEADS, head_size, head_size, 0.3)
    metadata = _metadata(block_size, device)
    step = torch.randn(7, 3, HEADS, head_size, device=device).to(dtype)
    step[5:] = torch.nan
    caches = torch.full((2, 71, block_size, HEADS, head_size), torch.nan, device=device, dtype=dtype)
    for row, length in enumerate(LENGTHS):
        for place in range(length - 1):
            block = metadata.block_table[row, place // block_size]
            caches[:, block, place % block_size] = torch.randn(2, HEADS, head_size, device=device).to(dtype)
    outs, written = [], []
    for op in (step_attention_torch, step_attention_triton):
        out, pools = torch.full((7, HEADS, head_size), 77.0, device=device, dtype=dtype), caches.clone()
        op(out, *step.unbind(1), *pools, metadata, spec)
        outs.append(out)
        written.append(pools)
    torch.testing.assert_close(written[1], written[0], rtol=0, atol=0, equal_nan=True)
    slots = metadata.slot_mapping[:5]
    for pool, part in zip(written[1], step.unbind(1)[1:], strict=True):
        assert torch.equal(pool.flatten(0, 1)[slots], part[:5])
    assert not outs[1][5:].any()
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-3, atol=1e-3 if dtype == torch.float16 else 1e-5)
    # A row that sees itself alone gives its value, one of two tokens their mean by weight.
    torch.testing.assert_close(outs[1][0], step[0, 2])
    place = metadata.block_table[4, 0]
    k, v = (
        torch.stack([pool[place, 0], part[4]]).float()
        for pool, part in zip(written[1], step.unbind(1)[1:], strict=True)
    )
    weights = (0.3 * (k * step[4, 0].float()).sum(-1)).softmax(0)
    torch.testing.assert_close(outs[1][4].float(), (weights[..., None] * v).sum(0), rtol=1e-3, atol=1e-3)


def test_what_it_does_not_serve_goes_the_other_way(device) -> None:
    spec = AttentionSpec(20, 20, 64, 64, 0.125)
    metadata = replace(_metadata(16, device), max_seq_len=448)
    query = torch.zeros(64, 20, 64, device=device)
    assert serves_step(query, metadata, spec) == query.is_cuda
    others = [replace(spec, num_kv_heads=10), replace(spec, sliding_window=8), replace(spec, soft_cap=1.0)]
    assert not any(serves_step(query, metadata, other) for other in others)
    assert not serves_step(query, replace(metadata, max_query_len=2), spec)
    assert not serves_step(query, replace(metadata, max_seq_len=4096), spec)
    assert not serves_step(query[:8], metadata, spec)
