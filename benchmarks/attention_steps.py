"""Steps that the attention benchmark measures, and what each must read and compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_states.attention import AttentionMetadata, AttentionSpec

SPEC = AttentionSpec(16, 8, 128, 128, 128**-0.5)
BLOCK_SIZE = 16
CACHE_BUDGET = 4 << 30  # bytes of all layers' caches

Rows = list[tuple[int, int]]  # (query_len, seq_len) each


@dataclass
class Inputs:
    """One step over several layers' caches."""

    query: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    metadata: AttentionMetadata
    spec: AttentionSpec


@dataclass(frozen=True)
class Step:
    """Rows, and what a step is told and padded to beyond them; 0 means no more than they need.

    A recorded step is told the model's longest sequence, and padded to a bucket of rows and tokens.
    """

    rows: Rows
    max_seq_len: int = 0
    num_reqs: int = 0
    num_tokens: int = 0


def make_inputs(
    step: Step, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, layers: int = 1
) -> Inputs:
    """Random data in shuffled blocks."""
    gen = torch.Generator().manual_seed(0)
    rows = step.rows + [(0, 0)] * (step.num_reqs - len(step.rows))
    needed = [-(-seq_len // BLOCK_SIZE) for _, seq_len in rows]
    num_blocks = sum(needed) + 1
    ids = (torch.randperm(num_blocks - 1, generator=gen) + 1).to(torch.int32)
    table = torch.zeros(len(rows), max(*needed, step.max_seq_len // BLOCK_SIZE), dtype=torch.int32)
    for row, blocks in enumerate(ids.split(needed)):
        table[row, : len(blocks)] = blocks
    lengths = torch.tensor([0] + [query_len for query_len, _ in rows])
    num_tokens = max(step.num_tokens, int(lengths.sum()))
    seq_lens = torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32)
    metadata = AttentionMetadata(
        lengths.cumsum(0).to(torch.int32).to(device),
        seq_lens.to(device),
        table.to(device),
        torch.full((num_tokens,), -1, device=device),
        max_query_len=max(step.num_tokens, int(lengths.max())),
        max_seq_len=max(step.max_seq_len, int(seq_lens.max())),
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
    return max(1, min(256, CACHE_BUDGET // cache_bytes(rows, SPEC, 2)))


def steps() -> dict[str, Step]:
    """The steps by name."""
    decode = {
        "1 x 384": [(1, 384)],
        "1 x 640": [(1, 640)],
        "1 x 2048": [(1, 2048)],
        "16 x 1024": [(1, 1024)] * 16,
        "64 x 1024": [(1, 1024)] * 64,
        "256 x 128..384": [(1, 128 + i * 97 % 257) for i in range(256)],
        "256 x 1024": [(1, 1024)] * 256,
        "256 x 256..2041": [(1, 256 + i * 97 % 256 * 7) for i in range(256)],
        "255 x 256, 1 x 40000": [(1, 256)] * 255 + [(1, 40000)],
    }
    prefill = {
        "16 x 128": [(128, 128)] * 16,
        "64 x 128": [(128, 128)] * 64,
        "24 x 32..492": [(32 + 20 * i, 32 + 20 * i) for i in range(24)],
        "8 x 1024": [(1024, 1024)] * 8,
        "1 x 8192": [(8192, 8192)],
        "4 x 512 after 4096": [(512, 4608)] * 4,
    }
    mixed = {
        "200 x 300 + 30": (200, [30], 256),
        "200 x 300 + 128, 300, 77, 512": (200, [128, 300, 77, 512], 1280),
        "250 x 300 + 60, 120, .., 360": (250, [60, 120, 180, 240, 300, 360], 1536),
    }
    found = {f"decode {name}": Step(rows, 40960) for name, rows in decode.items()}
    found["verify 64 x 1024, 4 queries"] = Step([(4, 1024)] * 64, 40960)
    found |= {f"prefill {name}": Step(rows) for name, rows in prefill.items()}
    for name, (decodes, chunks, num_tokens) in mixed.items():
        rows = [(1, 300)] * decodes + [(chunk, chunk) for chunk in chunks]
        found[f"mixed {name}"] = Step(rows, 40960, num_reqs=256, num_tokens=num_tokens)
    return found
