"""Cache groups: what a component asks the runner to allocate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of one layer; allocated as [num_blocks, *block_shape]."""

    block_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.block_shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a cache layout and a block table.

    layers: layer name -> tensor name -> its shape. sliding_window: tokens that a query can see, itself
    included; None is all of them. A group with a window gives blocks back that no later token can see.
    num_scratch_blocks: rows behind the blocks of every tensor that are the component's own; no table names them.
    """

    name: str
    block_size: int
    layers: Mapping[str, Mapping[str, CacheTensor]]
    sliding_window: int | None = None
    num_scratch_blocks: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(t.block_bytes for layer in self.layers.values() for t in layer.values())

    def allocate(self, num_blocks: int, device: torch.device) -> GroupCache:
        """Zeroed tensors [num_blocks + num_scratch_blocks, *block_shape] of every layer. Block 0 is the null block."""
        num_rows = num_blocks + self.num_scratch_blocks
        return {
            layer: {
                name: torch.zeros((num_rows, *t.block_shape), dtype=t.dtype, device=device)
                for name, t in tensors.items()
            }
            for layer, tensors in self.layers.items()
        }


GroupCache = Mapping[str, Mapping[str, torch.Tensor]]
Caches = Mapping[str, GroupCache]
