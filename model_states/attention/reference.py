"""Attention of one row, written to be read: what the paged kernels are held against."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec


def rows_of(metadata: AttentionMetadata) -> Iterator[tuple[int, int, int, int]]:
    """(row, first token, query_len, seq_len) of every row that has a query."""
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        if starts[row + 1] > starts[row]:
            yield row, starts[row], starts[row + 1] - starts[row], seq_len


def read_row(cache: torch.Tensor, blocks: torch.Tensor, first: int, seq_len: int) -> torch.Tensor:
    """Cached positions [first, seq_len) of one row, [seq_len - first, num_kv_heads, size]."""
    positions = torch.arange(first, seq_len, device=cache.device)
    block_size = cache.shape[1]
    return cache[blocks[positions // block_size].long(), positions % block_size]


def attend_row(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    seq_len: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last query_len queries of a sequence, [query_len, num_heads, head_size], over its cache.

    blocks is the row's block table, [max_blocks]. Returns fp32 [query_len, num_heads, head_size_v].
    """
    first_query = seq_len - query.shape[0]
    first = 0 if spec.sliding_window is None else max(0, first_query - spec.sliding_window + 1)
    group = spec.num_heads // spec.num_kv_heads
    key = read_row(key_cache, blocks, first, seq_len).float().repeat_interleave(group, 1)
    value = read_row(value_cache, blocks, first, seq_len).float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float() * spec.scale, key)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(first_query, seq_len)[:, None] - torch.arange(first, seq_len)[None, :]
    unseen = (distance < 0) | (distance >= (spec.sliding_window or seq_len))
    scores = scores.masked_fill(unseen.to(scores.device), float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value)
