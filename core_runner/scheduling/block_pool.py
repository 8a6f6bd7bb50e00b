"""Blocks of one cache group: who holds them, in which order they are given out, and which can be hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockPool:
    """`num_blocks` blocks with reference counts; block 0 is the null block and is never given out.

    A free block that carries a hash stays hit-able until it is given out again. Free blocks leave in least
    recently used order; those without a hash hold nothing of value and leave first.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self._ref_counts = [0] * num_blocks
        # Free blocks in two parts: those without a hash, of which the last leaves first, and then those with one, of
        # which the first does. An OrderedDict is a linked list in C: O(1) at both ends and in the middle.
        self._plain = list(range(num_blocks - 1, 0, -1))
        self._hashed: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in all, the null block included."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, hit-able ones included."""
        return len(self._plain) + len(self._hashed)

    @property
    def num_cached(self) -> int:
        """Blocks that carry a hash, held or free."""
        return len(self._block_of)

    def allocate(self, num: int) -> list[int]:
        """Hand out `num` blocks with one reference each; what they held can no longer be hit."""
        assert num <= self.num_free, (num, self.num_free)
        first = max(len(self._plain) - num, 0)
        block_ids = self._plain[first:]
        del self._plain[first:]
        block_ids.reverse()
        while len(block_ids) < num:
            block, _none = self._hashed.popitem(last=False)
            # Only now is the old content lost, and with it the hit.
            del self._block_of[self._hash_of.pop(block)]
            block_ids.append(block)
        refs = self._ref_counts
        for block in block_ids:
            refs[block] = 1
        return block_ids

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take one more reference to each block, which may be held by others or free and hit-able."""
        for block in block_ids:
            if self._ref_counts[block] == 0:
                del self._hashed[block]
            self._ref_counts[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block, last first, so that the tail of a chain is reused first."""
        refs, hash_of = self._ref_counts, self._hash_of
        for block in reversed(block_ids):
            left = refs[block] = refs[block] - 1
            assert left >= 0, f"block {block} was freed twice"
            if left == 0:
                if block in hash_of:
                    self._hashed[block] = None
                else:
                    self._plain.append(block)

    def is_held(self, block: int) -> bool:
        """True if somebody holds a reference."""
        return self._ref_counts[block] > 0

    def lookup(self, block_hash: bytes) -> int | None:
        """Block that holds the tokens behind the hash, or None."""
        return self._block_of.get(block_hash)

    def publish(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Make held blocks hit-able, the null block excepted. Of two blocks of one content the first is kept."""
        refs, block_of, hash_of = self._ref_counts, self._block_of, self._hash_of
        for block_hash, block in zip(hashes, blocks, strict=True):
            # A second copy stays private to its request and is reused early.
            if block and block_hash not in block_of and block not in hash_of:
                assert refs[block] > 0, f"block {block} is published while nobody holds it"
                block_of[block_hash] = block
                hash_of[block] = block_hash

    def forget(self, block_hash: bytes) -> None:
        """Stop offering the block of this hash, if there is one."""
        block = self._block_of.pop(block_hash, None)
        if block is None:
            return
        del self._hash_of[block]
        if block in self._hashed:
            del self._hashed[block]
            self._plain.append(block)

    def check_integrity(self, references: npt.NDArray[np.int64]) -> None:
        """Recount: `references[block]` is how many table entries name each block, [num_blocks]."""
        refs = np.asarray(self._ref_counts)
        wrong = np.flatnonzero(refs[1:] != references[1:]) + 1
        assert not len(wrong), f"blocks {wrong[:8]}: counted {refs[wrong[:8]]}, used {references[wrong[:8]]}"
        assert refs[0] == 0, "the null block was handed out"
        free = {*self._plain, *self._hashed}
        assert len(free) == self.num_free, "a block is free twice"
        assert 0 not in free, "the null block is in the free list"
        unheld = set(np.flatnonzero(refs[1:] == 0) + 1)
        assert unheld == free, f"free list differs in {sorted(unheld ^ free)[:8]}"
        assert set(self._hash_of) & free == set(self._hashed), "a free block is in the wrong part"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "hash maps differ"
