"""Rows of device tables that only some slots need: made on first use, and as many as are in use at once."""

from __future__ import annotations

import torch

from core_runner.scheduling.output import IntArray
from model_states.staged import StagedTensor

_LEAST_ROWS, _LEAST_COLUMNS = 4, 16


class RowPool:
    """Which row of a table each slot holds, and how many rows the table must have."""

    def __init__(self) -> None:
        self.capacity = 0
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []

    def take(self, slot: int) -> int:
        """A row for `slot`, which holds none; `capacity` is doubled when no row is free."""
        assert slot not in self._row_of, f"slot {slot} holds a row"
        if not self._free:
            grown = max(_LEAST_ROWS, 2 * self.capacity)
            self._free = list(range(self.capacity, grown))[::-1]
            self.capacity = grown
        row = self._row_of[slot] = self._free.pop()
        return row

    def give_back(self, slot: int) -> None:
        """Free the row of `slot`, if it holds one. The next owner's writes come after the steps that read it."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)


class SlotRows:
    """A table of integers, int32 [rows, columns]; both sizes are powers of two that grow with what is put in.

    `tensor` is None until the first `put`, and another one after each growth: read it anew in every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = RowPool()
        self._table: StagedTensor | None = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The table as of the last `apply`."""
        return None if self._table is None else self._table.tensor

    def put(self, slot: int, values: IntArray) -> int:
        """Give `slot` a row that begins with `values`; what comes after them is anything. Returns its number."""
        row = self._pool.take(slot)
        columns = max(_LEAST_COLUMNS, 1 << max(len(values) - 1, 0).bit_length())
        table = self._table
        if table is None or table.tensor.shape[0] < self._pool.capacity or table.tensor.shape[1] < columns:
            table = self._grow(columns)
        table.stage(row, 0, values)
        return row

    def give_back(self, slot: int) -> None:
        """Free the row of `slot`, if it holds one."""
        self._pool.give_back(slot)

    def apply(self) -> None:
        """Bring the new rows to the device, in stream order; nothing if there are none."""
        if self._table is not None:
            self._table.apply()

    def _grow(self, columns: int) -> StagedTensor:
        old = self._table
        rows = self._pool.capacity
        if old is not None:
            # What is staged names places of the old table.
            old.apply()
            columns = max(columns, old.tensor.shape[1])
        self._table = StagedTensor((rows, columns), torch.int32, self._device)
        if old is not None:
            self._table.tensor[: old.tensor.shape[0], : old.tensor.shape[1]] = old.tensor
        return self._table


class SeenRows:
    """Counts of the ids that a request holds; a row is zero when it is taken.

    tensor: int32 [rows, vocab_size]. bits: int32 [rows, words], in which bit id % 32 of word id // 32 is set where the
    count is not 0, so that who passes over a vocabulary reads few counts. Both are views of one table.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._pool = RowPool()
        self._vocab_size, self._device = vocab_size, device
        self._bits_at = -(-vocab_size // 4) * 4
        self._table: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The counts; another tensor after each growth."""
        return None if self._table is None else self._table[:, : self._vocab_size]

    @property
    def bits(self) -> torch.Tensor | None:
        """Where the counts are not 0."""
        return None if self._table is None else self._table[:, self._bits_at :]

    def take(self, slot: int) -> int:
        """Give `slot` a row; returns its number."""
        row = self._pool.take(slot)
        if self._table is None or len(self._table) < self._pool.capacity:
            old = self._table
            columns = self._bits_at + -(-self._vocab_size // 128) * 4
            self._table = torch.zeros((self._pool.capacity, columns), dtype=torch.int32, device=self._device)
            if old is not None:
                self._table[: len(old)] = old
        self._table[row].zero_()
        return row

    def give_back(self, slot: int) -> None:
        """Free the row of `slot`, if it holds one."""
        self._pool.give_back(slot)
