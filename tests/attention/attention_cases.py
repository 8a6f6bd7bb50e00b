"""Cases that every backend is tested with: a step over a paged cache, and dense attention beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from model_states.attention import AttentionMetadata, AttentionSpec


@dataclass(frozen=True)
class Case:
    """rows: (query_len, seq_len) each. Everything not in a row's own sequence is NaN."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int = 16
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    value_from_key: bool = False
    padding_tokens: int = 2
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.rows)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.head_size_v,
            self.head_size**-0.5,
            self.window,
            self.soft_cap,
            self.sinks,
            self.value_from_key,
        )


@dataclass
class Step:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    sinks: torch.Tensor | None
    keys: list[torch.Tensor]  # of each row, [seq_len, num_kv_heads, head_size]
    values: list[torch.Tensor]


def _fill(case: Case, gen: torch.Generator) -> tuple[torch.Tensor, ...] | Any:
    """Caches and tables: shuffled blocks, NaN wherever no row owns the position, block 0 all NaN."""
    needed = [-(-seq_len // case.block_size) for _, seq_len in case.rows]
    max_blocks = max(needed) + 2
    num_blocks = sum(needed) + 4
    key_cache = torch.full((num_blocks, case.block_size, case.num_kv_heads, case.head_size), float("nan"))
    value_cache = torch.full((num_blocks, case.block_size, case.num_kv_heads, case.head_size_v), float("nan"))
    free = (torch.randperm(num_blocks - 1, generator=gen) + 1).tolist()
    table = torch.zeros(len(case.rows), max_blocks, dtype=torch.int32)
    keys, values = [], []
    for row, (query_len, seq_len) in enumerate(case.rows):
        key = torch.randn(seq_len, case.num_kv_heads, case.head_size, generator=gen).to(case.dtype)
        value = torch.randn(seq_len, case.num_kv_heads, case.head_size_v, generator=gen).to(case.dtype)
        # Blocks behind the window of the first query were given back: their entries are the null block.
        seen_from = 0 if case.window is None else max(0, seq_len - query_len - case.window + 1)
        table[row, needed[row] :] = 10**6  # what lies past the sequence is not looked up
        for index in range(seen_from // case.block_size, needed[row]):
            table[row, index] = free.pop()
        for pos in range(seen_from // case.block_size * case.block_size, seq_len):
            block, offset = int(table[row, pos // case.block_size]), pos % case.block_size
            key_cache[block, offset], value_cache[block, offset] = key[pos].float(), value[pos].float()
        keys.append(key)
        values.append(key[..., : case.head_size_v] if case.value_from_key else value)
    return key_cache.to(case.dtype), value_cache.to(case.dtype), table, keys, values


def build(case: Case, device: torch.device) -> Step:
    gen = torch.Generator().manual_seed(case.seed)
    key_cache, value_cache, table, keys, values = _fill(case, gen)
    tokens = case.num_tokens + case.padding_tokens
    query = torch.randn(tokens, case.num_heads, case.head_size, generator=gen).to(case.dtype)
    query[case.num_tokens :] = float("nan")
    sinks = torch.randn(case.num_heads, generator=gen) if case.sinks else None
    lengths = torch.tensor([query_len for query_len, _ in case.rows])
    start_loc = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    seq_lens = torch.tensor([seq_len for _, seq_len in case.rows], dtype=torch.int32)
    metadata = AttentionMetadata(
        start_loc.to(device),
        seq_lens.to(device),
        table.to(device),
        torch.full((tokens,), -1, device=device),
        max(1, int(lengths.max())),
        max(1, int(seq_lens.max())),
    )
    moved = sinks.to(device) if sinks is not None else None
    key_cache, value_cache = key_cache.to(device), value_cache.to(device)
    if case.value_from_key:
        value_cache = key_cache[..., : case.head_size_v]
    return Step(query.to(device), key_cache, value_cache, metadata, moved, keys, values)


def _dense_row(
    case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any
) -> torch.Tensor:
    """One row, one head and one query at a time, in float64."""
    query_len, seq_len = query.shape[0], key.shape[0]
    out = torch.zeros(query_len, case.num_heads, case.head_size_v, dtype=torch.float64)
    for i in range(query_len):
        pos = seq_len - query_len + i
        low = 0 if case.window is None else max(0, pos - case.window + 1)
        for head in range(case.num_heads):
            kv_head = head // (case.num_heads // case.num_kv_heads)
            scores = key[low : pos + 1, kv_head].double() @ query[i, head].double() * case.head_size**-0.5
            if case.soft_cap is not None:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            weights = scores.exp()
            total = weights.sum() + (sinks[head].double().exp() if sinks is not None else 0.0)
            out[i, head] = (weights / total) @ value[low : pos + 1, kv_head].double()
    return out


def dense(case: Case, step: Step) -> torch.Tensor:
    """What every backend must return for the real tokens, fp32 [num_tokens, num_heads, head_size_v]."""
    query = step.query.cpu()
    sinks = step.sinks.cpu() if step.sinks is not None else None
    out, start = [], 0
    for (query_len, _), key, value in zip(case.rows, step.keys, step.values, strict=True):
        out.append(_dense_row(case, query[start : start + query_len], key, value, sinks))
        start += query_len
    return torch.cat(out).float().to(step.query.device)
