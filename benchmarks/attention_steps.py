"""Steps that the attention benchmark measures, and what each must read and compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_states.attention import AttentionMetadata, AttentionSpec

SPEC = AttentionSpec(16, 8, 128, 128, 128**-0.5)
BLOCK_SIZE = 16
CACHE_BUDGET = 8 << 30  # bytes of all layers' caches

Rows = list[tuple[int, int]]  # (query_len, seq_len) each


@dataclass
class Inputs:
    """One step over several layers' caches."""

    query: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    metadata: AttentionMetadata
    spec: AttentionSpec


def make_inputs(
    rows: Rows, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, layers: int = 1, bound: int = 0
) -> Inputs:
    """Random data in shuffled blocks. bound: max_seq_len that the step is told (a graph is told the model's)."""
    gen = torch.Generator().manual_seed(0)
    needed = [-(-seq_len // BLOCK_SIZE) for _, seq_len in rows]
    num_blocks = sum(needed) + 1
    ids = (torch.randperm(num_blocks - 1, generator=gen) + 1).to(torch.int32)
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    for row, blocks in enumerate(ids.split(needed)):
        table[row, : len(blocks)] = blocks
    lengths = torch.tensor([0] + [query_len for query_len, _ in rows])
    max_query_len, num_tokens = int(lengths.max()), int(lengths.sum())
    max_seq_len = max(bound, *(seq_len for _, seq_len in rows))
    seq_lens = torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32)
    metadata = AttentionMetadata(
        lengths.cumsum(0).to(torch.int32).to(device),
        seq_lens.to(device),
        table.to(device),
        torch.full((num_tokens,), -1, device=device),
        max_query_len,
        max_seq_len,
    )

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def cache(size: int) -> torch.Tensor:
        return randn(num_blocks, BLOCK_SIZE, spec.num_kv_heads, size)

    caches = [(cache(spec.head_size), cache(spec.head_size_v)) for _ in range(layers)]
    return Inputs(randn(num_tokens, spec.num_heads, spec.head_size), caches, metadata, spec)


def cache_bytes(rows: Rows, spec: AttentionSpec, itemsize: int) -> int:
    """Bytes of keys and values that a step must read once."""
    return sum(s for _, s in rows) * spec.num_kv_heads * (spec.head_size + spec.head_size_v) * itemsize


def attention_flop(rows: Rows, spec: AttentionSpec) -> int:
    """FLOP of the two products over the keys that each query sees."""
    pairs = sum(q * (s - q) + q * (q + 1) // 2 for q, s in rows)
    return 2 * pairs * spec.num_heads * (spec.head_size + spec.head_size_v)


def layers_for(rows: Rows) -> int:
    """Enough layers to flush the L2 cache, within the memory budget."""
    return max(1, min(28, CACHE_BUDGET // cache_bytes(rows, SPEC, 2)))


def steps() -> dict[str, tuple[Rows, int]]:
    """Name -> rows, and the bound of the sequence length that the step is told."""
    spread = [(1, 256 + i * 7) for i in range(256)]
    return {
        "decode 1 x 512": ([(1, 512)], 0),
        "decode 1 x 2048": ([(1, 2048)], 0),
        "decode 16 x 1024": ([(1, 1024)] * 16, 0),
        "decode 64 x 1024": ([(1, 1024)] * 64, 0),
        "decode 256 x 256": ([(1, 256)] * 256, 0),
        "decode 256 x 256, bound 40960": ([(1, 256)] * 256, 40960),
        "decode 256 x 512": ([(1, 512)] * 256, 0),
        "decode 256 x 1024": ([(1, 1024)] * 256, 0),
        "decode 256 x 2048": ([(1, 2048)] * 256, 0),
        "decode 256 x 256..2041": (spread, 0),
        "verify 64 x 1024, 4 queries": ([(4, 1024)] * 64, 0),
        "prefill 16 x 128": ([(128, 128)] * 16, 0),
        "prefill 8 x 1024": ([(1024, 1024)] * 8, 0),
        "prefill 1 x 8192": ([(8192, 8192)], 0),
        "prefill 4 x 512 after 4096": ([(512, 4608)] * 4, 0),
        "mixed 255 x 1024 + 512": ([(1, 1024)] * 255 + [(512, 512)], 0),
    }
