"""`BlockTables`: slot -> block ids, one table per cache group, changed by staged writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from core_runner.errors import SchedulerOutputError
from core_runner.scheduling.output import BlockUpdate
from model_states.staged import StagedTensor
from model_states.staged_writer import StagedWriter

NULL_BLOCK = 0


class BlockTables:
    """Per cache group a table int32 [R + 1, max_blocks]; row R, the null slot's, holds only the null block.

    group_specs: (block_size, sliding_window) of each group. num_blocks: blocks of each group's pool, once
    they are known, to refuse ids that lie outside; None leaves that to the caller. A freed row is not
    cleared, because lengths guard it; poison=True points it at the null block, whose contents are nobody's. writer:
    see `StagedTensor`.
    """

    def __init__(
        self,
        group_specs: Sequence[tuple[int, int | None]],
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device | str,
        *,
        num_blocks: Sequence[int] | None = None,
        poison: bool = False,
        writer: StagedWriter | None = None,
    ) -> None:
        self.block_sizes = tuple(block_size for block_size, _ in group_specs)
        self.max_blocks = tuple(-(-max_model_len // block_size) for block_size in self.block_sizes)
        self.max_num_reqs = max_num_reqs
        self.num_blocks = num_blocks
        # Columns written since a slot was last given up; a later step may use no others.
        self._filled: npt.NDArray[np.int32] = np.zeros((len(self.block_sizes), max_num_reqs), dtype=np.int32)
        self._poison = poison
        self._tables = [
            StagedTensor((max_num_reqs + 1, max_blocks), torch.int32, device, fill=NULL_BLOCK, writer=writer)
            for max_blocks in self.max_blocks
        ]

    @property
    def num_groups(self) -> int:
        """Cache groups."""
        return len(self._tables)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Per group, int32 [R + 1, max_blocks]; the same tensors for the life of this object."""
        return tuple(table.tensor for table in self._tables)

    def apply_update(self, group: int, update: BlockUpdate) -> None:
        """Stage the runs of one group. Raises `SchedulerOutputError` before anything changes."""
        self._check_update(group, update)
        self.stage_update(group, update)

    def stage_update(self, group: int, update: BlockUpdate) -> None:
        """`apply_update` for runs that `check_changes` has let pass."""
        if len(update.slots) == len(update.block_ids) == 0:
            return
        _extend(self._filled[group], update)
        self._tables[group].stage_runs(update.slots, update.starts, update.lengths, update.block_ids)

    def remove(self, *slots: int) -> None:
        """Give up the rows of `slots` in every group."""
        self._filled[:, slots] = 0
        if self._poison:
            for slot in slots:
                for table, max_blocks in zip(self._tables, self.max_blocks, strict=True):
                    table.stage(slot, 0, np.full(max_blocks, NULL_BLOCK))

    def apply_staged_writes(self) -> None:
        """Bring the changes to the device; launches nothing for a group that has none."""
        for table in self._tables:
            table.apply()

    def check_changes(
        self, removed_slots: Sequence[int], updates: Sequence[BlockUpdate]
    ) -> npt.NDArray[np.int32]:
        """Columns that each slot will have filled after these removals and updates, [num_groups, R].

        Changes nothing. Raises `SchedulerOutputError` for an update that does not fit its group's table.
        """
        if len(updates) > self.num_groups:
            raise SchedulerOutputError(f"{len(updates)} block updates for {self.num_groups} cache groups")
        filled = self._filled.copy()
        filled[:, list(removed_slots)] = 0
        for group, update in enumerate(updates):
            self._check_update(group, update)
            _extend(filled[group], update)
        return filled

    def _check_update(self, group: int, update: BlockUpdate) -> None:
        who = f"block update of cache group {group}"
        if not 0 <= group < self.num_groups:
            raise SchedulerOutputError(f"{who}: there are {self.num_groups} cache groups")
        slots, starts, lengths = (np.asarray(a) for a in (update.slots, update.starts, update.lengths))
        if not slots.shape == starts.shape == lengths.shape or slots.ndim != 1:
            raise SchedulerOutputError(
                f"{who}: slots {slots.shape}, starts {starts.shape} and lengths {lengths.shape} must be "
                f"one-dimensional and equally long"
            )
        ids = np.asarray(update.block_ids)
        if lengths.sum() != ids.size:
            raise SchedulerOutputError(
                f"{who}: lengths add up to {lengths.sum()}, but there are {ids.size} block ids"
            )
        if slots.size == 0:
            return
        _check_range(f"{who}: slot", slots, self.max_num_reqs - 1)
        _check_range(f"{who}: start", starts, self.max_blocks[group])
        _check_range(f"{who}: length", lengths, self.max_blocks[group])
        _check_range(f"{who}: end of a run", starts + lengths, self.max_blocks[group])
        if ids.size:
            last = np.iinfo(np.int32).max if self.num_blocks is None else self.num_blocks[group] - 1
            _check_range(f"{who}: block id", ids, last)


def _extend(filled: npt.NDArray[np.int32], update: BlockUpdate) -> None:
    np.maximum.at(filled, update.slots, np.add(update.starts, update.lengths, dtype=np.int32))


def _check_range(what: str, values: np.ndarray, last: int) -> None:
    least, most = int(np.minimum.reduce(values)), int(np.maximum.reduce(values))
    if least < 0 or most > last:
        raise SchedulerOutputError(f"{what} {least if least < 0 else most} is outside [0, {last}]")
