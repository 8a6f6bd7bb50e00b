"""Paged attention in plain torch: the reference, and what a machine without a GPU runs.

Queries are cut into tiles of at most `TILE` tokens of one row. Tiles of the same length that look at a
similar number of blocks are computed together, so all decode rows of a step cost a few matrix products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec

TILE = 256
MAX_SCORES = 1 << 25  # scores held at once, which bounds the memory of a group of tiles


def write_cache_torch(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """cache[slot_mapping[t]] = key[t], value[t]; shapes as in `AttentionBackend.write_cache`."""
    # Padding goes to the null block, which is nobody's: a filter would make the host wait for the device.
    slots = slot_mapping.clamp(min=0)
    key_cache.view(-1, *key_cache.shape[2:])[slots] = key.to(key_cache.dtype)
    if value is not None:
        value_cache.view(-1, *value_cache.shape[2:])[slots] = value.to(value_cache.dtype)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive queries of one row: where they are in the step, and which keys they see."""

    row: int
    token: int  # of the first query, in the step
    position: int  # of the first query, in the sequence
    first_block: int  # of the keys that some query of the tile sees


@dataclass(frozen=True, slots=True)
class _Group:
    """Tiles of `length` queries each that look at up to `num_blocks` blocks each."""

    length: int
    num_blocks: int
    tiles: list[_Tile]


def _round_up(num_blocks: int) -> int:
    """To two significant bits (1, 2, 3, 4, 6, 8, 12, ..), so that rows of similar lengths share a group."""
    step = 1 << max(0, (num_blocks - 1).bit_length() - 2)
    return -(-num_blocks // step) * step


def _plan(metadata: AttentionMetadata, block_size: int, spec: AttentionSpec) -> Iterator[_Group]:
    """The tiles of a step, grouped. Reads the lengths on the host, so a GPU is waited for."""
    starts = metadata.query_start_loc.tolist()
    groups: defaultdict[tuple[int, int], list[_Tile]] = defaultdict(list)
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        for token in range(start, end, TILE):
            length = min(TILE, end - token)
            position = seq_len - end + token
            first = (
                0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1) // block_size
            )
            num_blocks = (position + length - 1) // block_size + 1 - first
            groups[length, _round_up(num_blocks)].append(_Tile(row, token, position, first))
    for (length, num_blocks), tiles in groups.items():
        each = length * spec.num_heads * num_blocks * block_size
        size = max(1, MAX_SCORES // each)
        for i in range(0, len(tiles), size):
            yield _Group(length, num_blocks, tiles[i : i + size])


def _visible(positions: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys a query sees: [n, length] and [n, num_keys] to bool [n, length, num_keys]."""
    distance = positions[:, :, None] - keys[:, None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis of [n, num_kv_heads, group, length, num_keys]; a sink takes its share."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(1, scores.shape[1], scores.shape[2], 1, 1)
    column = column.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """cache [num_blocks, block_size, num_kv_heads, size], read at slots
    [n, num_keys], as fp32 [n, num_kv_heads, num_keys, size].

    Heads come before keys, as the matrix products want it, so that nothing is copied a second time.
    """
    heads = cache.shape[2]
    index = slots[:, None, :] * heads + torch.arange(heads, device=slots.device)[:, None]
    return cache.view(-1, cache.shape[3]).index_select(0, index.view(-1)).view(*index.shape, -1).float()


def _attend_group(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of query [n, length, num_heads, head_size] over key and value [n, num_kv_heads, num_keys, _].

    seen is bool [n, length, num_keys]. Returns fp32 [n, length, num_heads, head_size_v].
    """
    n, length = query.shape[:2]
    kv_heads, group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    q = (query.float() * spec.scale).view(n, length, kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    q = q.reshape(n, kv_heads, group * length, -1)
    scores = (q @ key.transpose(2, 3)).view(n, kv_heads, group, length, -1)
    if spec.soft_cap is not None:
        scores = (scores / spec.soft_cap).tanh_() * spec.soft_cap
    weights = _softmax(scores.masked_fill_(~seen[:, None, None], float("-inf")), sinks)
    out = weights.reshape(n, kv_heads, group * length, -1) @ value
    return (
        out.view(n, kv_heads, group, length, -1).permute(0, 3, 1, 2, 4).reshape(n, length, spec.num_heads, -1)
    )


class TorchAttention:
    """The reference backend. Every layer, dtype and device is supported."""

    name = "torch"

    def unsupported(
        self, spec: AttentionSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Only a layer whose heads cannot be shared out is refused."""
        if spec.num_heads % spec.num_kv_heads:
            return f"num_heads={spec.num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}"
        return None

    def write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionBackend.write_cache`."""
        write_cache_torch(key, value, key_cache, value_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. Padding tokens get zeros. On a GPU this waits for the lengths."""
        block_size = key_cache.shape[1]
        table = metadata.block_table
        out = query.new_zeros(query.shape[0], spec.num_heads, spec.head_size_v)
        for group in _plan(metadata, block_size, spec):
            columns = list(
                zip(*((t.row, t.token, t.position, t.first_block) for t in group.tiles), strict=True)
            )
            rows, tokens, positions, first = torch.tensor(columns, device=table.device).unsqueeze(-1)
            within = torch.arange(group.length, device=table.device)
            tokens, positions = tokens + within, positions + within
            keys = first * block_size + torch.arange(group.num_blocks * block_size, device=table.device)
            # Rounding up may run past the table; those keys are past every query and so never seen.
            blocks = table[rows, (keys // block_size).clamp_(max=table.shape[1] - 1)].long()
            slots = blocks * block_size + keys % block_size
            seen = _visible(positions, keys, spec.sliding_window)
            # A weight of 0 does not silence a NaN: instead of keys that no query sees, the last one is read.
            last = slots.gather(1, positions[:, -1:] - first * block_size)
            slots = slots.where(seen.any(1), last)
            k = _gather(key_cache, slots)
            v = k[..., : spec.head_size_v] if spec.value_from_key else _gather(value_cache, slots)
            out[tokens] = _attend_group(query[tokens], k, v, seen, spec, sinks).to(out.dtype)
        return out
