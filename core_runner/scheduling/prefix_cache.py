"""Prefix hits: a hash chain over full blocks, and the longest prefix that every cache group still holds.

Blocks of a prompt are offered as soon as a step that fills them is scheduled, so that others need not wait for its
end. Whether their content is finite shows later, when the request's first token is sampled: a request that fails takes
back all that it computed or relied on, and one that is aborted before that takes back what it computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from core_runner.request import Request
from core_runner.scheduling.block_pool import BlockPool

_HASH_BYTES = 16


class GroupSpec(NamedTuple):
    """What the scheduler must know of one cache group.

    block_size: tokens of a block. sliding_window: tokens that a query can see, itself included; None is all.
    """

    block_size: int
    sliding_window: int | None = None

    def num_unseen_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token from `num_computed_tokens` on can see."""
        if self.sliding_window is None:
            return 0
        return max(0, num_computed_tokens - self.sliding_window + 1) // self.block_size


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix that need not be computed: its length, and per group its blocks (0 where none is needed)."""

    num_tokens: int
    block_ids: tuple[list[int], ...]


class PrefixCache:
    """Finds and publishes blocks by content. Groups of one block size share a request's hash chain."""

    def __init__(self, groups: Sequence[GroupSpec], pools: Sequence[BlockPool]) -> None:
        self._groups = tuple(groups)
        self._pools = tuple(pools)
        self.alignment = math.lcm(*(group.block_size for group in groups))
        self.no_hit = PrefixHit(0, tuple([] for _ in groups))

    def find(self, request: Request) -> PrefixHit:
        """Longest common hit: a multiple of every block size, and no longer than the request allows."""
        length = self._align(request.max_hit_len)
        previous = -1
        # Every group may shorten what the others agreed on; lengths only fall, so this ends.
        while length != previous and length > 0:
            previous = length
            for group, pool in zip(self._groups, self._pools, strict=True):
                length = self._shorten(request, group, pool, length)
        if length <= 0:
            return self.no_hit
        pairs = zip(self._groups, self._pools, strict=True)
        return PrefixHit(length, tuple(self._blocks(request, group, pool, length) for group, pool in pairs))

    def publish(self, request: Request, group_idx: int, start: int, blocks: Sequence[int]) -> None:
        """Offer the request's blocks from the `start`-th on, whose tokens are known and scheduled; 0 is passed over."""
        stop = start + len(blocks)
        hashes = self._hashes(request, self._groups[group_idx].block_size, stop)
        self._pools[group_idx].publish(hashes[start:stop], blocks)

    def forget(self, request: Request, num_kept: int = 0) -> None:
        """Offer nothing of the request's chain that holds tokens from `num_kept` on."""
        for group, pool in zip(self._groups, self._pools, strict=True):
            for block_hash in request.block_hashes.get(group.block_size, [])[num_kept // group.block_size :]:
                pool.forget(block_hash)

    def _align(self, num_tokens: int) -> int:
        return num_tokens // self.alignment * self.alignment

    def _shorten(self, request: Request, group: GroupSpec, pool: BlockPool, length: int) -> int:
        """Longest usable hit of one group that is not longer than `length`."""
        hashes = self._hashes(request, group.block_size, length // group.block_size)
        if group.sliding_window is None:
            for idx in range(length // group.block_size):
                if pool.lookup(hashes[idx]) is None:
                    return self._align(idx * group.block_size)
            return length
        idx = length // group.block_size - 1
        while idx >= group.num_unseen_blocks(length):
            if pool.lookup(hashes[idx]) is None:
                # A shorter hit sees further back but never past its own end: the hole must lie behind it.
                length = self._align(idx * group.block_size)
                idx = length // group.block_size
            idx -= 1
        return length

    def _blocks(self, request: Request, group: GroupSpec, pool: BlockPool, length: int) -> list[int]:
        unseen = group.num_unseen_blocks(length)
        hashes = request.block_hashes[group.block_size][unseen : length // group.block_size]
        return [0] * unseen + [pool.lookup(block_hash) or 0 for block_hash in hashes]

    def _hashes(self, request: Request, block_size: int, num_blocks: int) -> list[bytes]:
        """The request's chain, at least `num_blocks` long; a block's hash covers all tokens before it."""
        chain = request.block_hashes.setdefault(block_size, [])
        if len(chain) >= num_blocks:
            return chain
        parent = chain[-1] if chain else _root(request)
        start = len(chain) * block_size
        tokens = request.token_ids(start, num_blocks * block_size).tobytes()
        step = 4 * block_size
        for offset in range(0, len(tokens), step):
            # `_hash` without its call, which takes a fourth of the time.
            parent = blake2b(parent + tokens[offset : offset + step], digest_size=_HASH_BYTES).digest()
            chain.append(parent)
        return chain


def _root(request: Request) -> bytes:
    """Parent of a first block: chains of different salts, or of different model inputs, never meet."""
    if not request.cache_salt and not request.input_keys:
        return _PLAIN_ROOT
    root = _hash(b"", request.cache_salt.encode())
    for name in sorted(request.input_keys):
        root = _hash(_hash(root, name.encode()), request.input_keys[name])
    return root


def _hash(parent: bytes, content: bytes) -> bytes:
    return blake2b(parent + content, digest_size=_HASH_BYTES).digest()


_PLAIN_ROOT = _hash(b"", b"")
