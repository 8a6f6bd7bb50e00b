"""Block tables of several groups against numpy rows, and updates that must be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core_runner.block_tables import BlockTables
from core_runner.errors import SchedulerOutputError
from core_runner.scheduling.output import BlockUpdate

R, L = 5, 50
GROUPS = [(16, None), (4, 8)]


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("poison", [False, True])
def test_random_updates_equal_numpy_rows(device: torch.device, poison: bool) -> None:
    rng = np.random.default_rng(5)
    tables = BlockTables(GROUPS, R, L, device, num_blocks=[1000, 1000], poison=poison)
    assert [tuple(t.shape) for t in tables.tensors] == [(R + 1, 4), (R + 1, 13)]
    addresses = [t.data_ptr() for t in tables.tensors]
    expected = [np.zeros(t.shape, dtype=np.int32) for t in tables.tensors]
    for _ in range(60):
        for slot in rng.permutation(R)[: rng.integers(0, 2)]:
            tables.remove(int(slot))
            for rows in expected:
                rows[slot] = 0 if poison else rows[slot]
        for group, rows in enumerate(expected):
            slots = rng.permutation(R)[: rng.integers(0, R + 1)].astype(np.int32)
            starts = rng.integers(0, rows.shape[1], len(slots), dtype=np.int32)
            lengths = ints(*(int(rng.integers(0, rows.shape[1] - start + 1)) for start in starts))
            ids = rng.integers(0, 1000, lengths.sum(), dtype=np.int32)
            tables.apply_update(group, BlockUpdate(slots, starts, lengths, ids))
            for slot, start, run in zip(slots, starts, np.split(ids, np.cumsum(lengths)), strict=False):
                rows[slot, start : start + len(run)] = run
        tables.apply_staged_writes()
        for table, rows in zip(tables.tensors, expected, strict=True):
            np.testing.assert_array_equal(table.cpu().numpy(), rows)
    assert [t.data_ptr() for t in tables.tensors] == addresses


BAD_UPDATES = {
    "group": (2, (ints(0), ints(0), ints(1), ints(1)), "there are 2 cache groups"),
    "null slot": (0, (ints(R), ints(0), ints(1), ints(1)), "slot 5 is outside [0, 4]"),
    "negative slot": (0, (ints(0, -2), ints(0, 0), ints(1, 1), ints(1, 2)), "slot -2 is outside [0, 4]"),
    "start": (0, (ints(0), ints(-1), ints(1), ints(1)), "start -1 is outside [0, 4]"),
    "length": (0, (ints(0, 0), ints(0, 0), ints(2, -1), ints(1)), "length -1 is outside [0, 4]"),
    "end": (0, (ints(0), ints(3), ints(2), ints(1, 2)), "end of a run 5 is outside [0, 4]"),
    "sum": (0, (ints(0), ints(0), ints(2), ints(1)), "lengths add up to 2, but there are 1 block ids"),
    "shapes": (0, (ints(0, 1), ints(0), ints(1), ints(1)), "must be one-dimensional and equally long"),
    "id": (1, (ints(0), ints(0), ints(2), ints(1, 9)), "block id 9 is outside [0, 8]"),
    "negative id": (1, (ints(0), ints(0), ints(1), ints(-1)), "block id -1 is outside [0, 8]"),
}


@pytest.mark.parametrize(("group", "arrays", "message"), BAD_UPDATES.values(), ids=BAD_UPDATES)
def test_a_bad_update_names_the_value_and_changes_nothing(
    group: int, arrays: tuple[Any, ...], message: str
) -> None:
    tables = BlockTables(GROUPS, R, L, "cpu", num_blocks=[9, 9])
    with pytest.raises(SchedulerOutputError) as error:
        tables.apply_update(group, BlockUpdate(*arrays))
    assert message in str(error.value)
    assert f"cache group {group}" in str(error.value)
    tables.apply_staged_writes()
    assert not any(table.any() for table in tables.tensors)
    assert not tables.check_changes([], []).any()


def test_filled_columns_follow_removals_and_updates() -> None:
    tables = BlockTables(GROUPS, R, L, "cpu")
    tables.apply_update(0, BlockUpdate(ints(1, 2), ints(0, 0), ints(2, 3), ints(1, 2, 3, 4, 5)))
    tables.apply_update(0, BlockUpdate(ints(2), ints(0), ints(1), ints(0)))  # out of the window: given back
    update = BlockUpdate(ints(1), ints(0), ints(1), ints(7))
    assert tables.check_changes([1], [update]).tolist() == [[0, 1, 3, 0, 0], [0] * 5]
    assert tables.check_changes([], []).tolist() == [[0, 2, 3, 0, 0], [0] * 5]
    tables.remove(2)
    assert tables.check_changes([], []).tolist() == [[0, 2, 0, 0, 0], [0] * 5]


def test_more_updates_than_groups() -> None:
    nothing = BlockUpdate(ints(), ints(), ints(), ints())
    with pytest.raises(SchedulerOutputError, match="3 block updates for 2 cache groups"):
        BlockTables(GROUPS, R, L, "cpu").check_changes([], [nothing] * 3)
