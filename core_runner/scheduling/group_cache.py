"""Block lists of one cache group, by slot: a host mirror of the device's block table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core_runner.scheduling.block_pool import BlockPool
from core_runner.scheduling.output import BlockUpdate, IntArray
from core_runner.scheduling.prefix_cache import GroupSpec

_NONE: IntArray = np.zeros(0, np.int32)
_NO_UPDATE = BlockUpdate(_NONE, _NONE, _NONE, _NONE)
_NEVER_PUBLISHED = np.int32(2**31 - 1)


class GroupCache:
    """Blocks of one group. R = max_num_reqs; max_blocks = ceil(max_model_len / block_size).

    table: [R, max_blocks]; columns [0, num_unseen) are null (given back, or not needed behind a prefix hit),
    [num_unseen, num_blocks) are held. num_published: leading columns that are offered for prefix hits.
    """

    def __init__(self, spec: GroupSpec, num_blocks: int, max_num_reqs: int, max_model_len: int) -> None:
        self.spec = spec
        self.pool = BlockPool(num_blocks)
        max_blocks = -(-max_model_len // spec.block_size)
        # Pages that no request reaches stay untouched, so a long max_model_len costs little.
        self.table = np.zeros((max_num_reqs, max_blocks), np.int32)
        self.num_blocks_np = np.zeros(max_num_reqs, np.int32)
        self.num_unseen_np = np.zeros(max_num_reqs, np.int32)
        self.num_published_np = np.zeros(max_num_reqs, np.int32)
        self._runs: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
        self._admitted: list[int] = []  # slots whose whole rows are new, after all of `_runs`
        self._released: set[int] = set()

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks that a request holds at once while `num_tokens` tokens are computed, chunk by chunk."""
        block_size, window = self.spec.block_size, self.spec.sliding_window
        whole = -(-num_tokens // block_size)
        if window is None:
            return whole
        return min(whole, -(-(window - 1 + min(max_chunk, num_tokens)) // block_size) + 1)

    def num_missing(self, slots: IntArray, num_tokens: IntArray) -> IntArray:
        """Blocks that each slot lacks to cover its first `num_tokens` tokens, [n]."""
        block_size = self.spec.block_size
        needed = (num_tokens + (block_size - 1)) // block_size
        missing: IntArray = np.maximum(needed - self.num_blocks_np[slots], 0)
        return missing

    def append(self, slots: IntArray, num_missing: IntArray) -> None:
        """Give each slot `num_missing` more blocks; the caller has checked that the pool holds them."""
        rows = np.flatnonzero(num_missing)
        if not len(rows):
            return
        slots, lengths = slots[rows], num_missing[rows]
        starts = self.num_blocks_np[slots]
        block_ids = np.array(self.pool.allocate(int(lengths.sum())), np.int32)
        row_idx, columns = _cells(slots, starts, lengths)
        self.table[row_idx, columns] = block_ids
        self.num_blocks_np[slots] = starts + lengths
        self._runs.append((slots, starts, lengths, block_ids))

    def give_back_unseen(self, slots: IntArray, num_computed: IntArray) -> None:
        """Free the blocks that no token from `num_computed` on can see; their table entries become null."""
        spec = self.spec
        if spec.sliding_window is None:
            return
        unseen = np.maximum(num_computed - (spec.sliding_window - 1), 0) // spec.block_size
        starts = self.num_unseen_np[slots]
        rows = np.flatnonzero(unseen > starts)
        if not len(rows):
            return
        slots, starts, unseen = slots[rows], starts[rows], unseen[rows].astype(np.int32)
        lengths = unseen - starts
        row_idx, columns = _cells(slots, starts, lengths)
        # Two rows may hold one block by a hit, so references are given back one by one.
        self.pool.free(self.table[row_idx, columns].tolist())
        self.table[row_idx, columns] = 0
        self.num_unseen_np[slots] = unseen
        self._runs.append((slots, starts, lengths, np.zeros(int(lengths.sum()), np.int32)))

    def admit(self, slot: int, hit_ids: Sequence[int], num_tokens: int, is_offered: bool) -> int:
        """Fill a free slot: the blocks of a prefix hit (leading zeros are null), then new ones; returns how many.

        is_offered: whether `publish` is to offer its blocks.
        """
        assert self.num_blocks_np[slot] == 0, f"slot {slot} still holds blocks"
        num_blocks, num_hit = -(-num_tokens // self.spec.block_size), len(hit_ids)
        if num_hit:
            # A window group needs only the end of a hit; null blocks always lead.
            num_null = hit_ids.count(0)
            # Before anything is allocated, or a free hit block could be handed out as a new one.
            self.pool.touch(hit_ids[num_null:])
            self.table[slot, :num_hit] = hit_ids
            self.num_unseen_np[slot] = num_null
        self.table[slot, num_hit:num_blocks] = self.pool.allocate(num_blocks - num_hit)
        self.num_blocks_np[slot] = num_blocks
        self.num_published_np[slot] = num_hit if is_offered else _NEVER_PUBLISHED
        self._admitted.append(slot)
        return num_blocks

    def release(self, slot: int) -> None:
        """Free every block of a slot."""
        num_blocks = int(self.num_blocks_np[slot])
        row = self.table[slot, :num_blocks]
        self.pool.free(row[self.num_unseen_np[slot] :].tolist())
        row[:] = 0
        self.num_blocks_np[slot] = self.num_unseen_np[slot] = self.num_published_np[slot] = 0
        # A slot that is preempted while a step is built may have entries of that step already.
        if self._runs or self._admitted:
            self._released.add(slot)

    def take_update(self) -> BlockUpdate:
        """The changes since the last call, without those of slots that were released since."""
        runs, self._runs = self._runs, []
        if self._admitted:
            runs.append(self._whole_rows([slot for slot in self._admitted if slot not in self._released]))
            self._admitted = []
        if self._released:
            runs = [_without(run, self._released) for run in runs]
            self._released = set()
        if not runs:
            return _NO_UPDATE
        if len(runs) == 1:
            return BlockUpdate(*runs[0])
        return BlockUpdate(*(np.concatenate(parts) for parts in zip(*runs, strict=True)))

    def _whole_rows(self, admitted: Sequence[int]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The runs of slots that were filled from their first column on."""
        slots = np.array(admitted, np.int32)
        lengths = self.num_blocks_np[slots]
        starts = np.zeros_like(slots)
        return slots, starts, lengths, self.table[_cells(slots, starts, lengths)]

    def check_integrity(self) -> None:
        """Recount the references of every block from the table."""
        columns = np.arange(self.table.shape[1])
        held = (columns >= self.num_unseen_np[:, None]) & (columns < self.num_blocks_np[:, None])
        assert (self.table[held] > 0).all(), "a held table entry is null"
        assert not self.table[~held].any(), "a table entry outside the held range is not null"
        self.pool.check_integrity(np.bincount(self.table[held], minlength=self.pool.num_blocks))


def _cells(slots: IntArray, starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Row and column of every table entry of the runs, one run after another."""
    # A steady decode step adds single blocks.
    if int(lengths.max()) == 1:
        return slots, starts
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return np.repeat(slots, lengths), np.repeat(starts, lengths) + within.astype(np.int32)


def _without(
    run: tuple[IntArray, IntArray, IntArray, IntArray], released: set[int]
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    slots, starts, lengths, block_ids = run
    keep: npt.NDArray[np.bool_] = ~np.isin(slots, list(released))
    return slots[keep], starts[keep], lengths[keep], block_ids[np.repeat(keep, lengths)]
