"""What one group reports of its table: whole rows of admissions, and nothing of slots that were given up since."""

from __future__ import annotations

from core_runner.scheduling.group_cache import GroupCache
from core_runner.scheduling.prefix_cache import GroupSpec


def reported(cache: GroupCache) -> dict[int, list[int]]:
    """Slot -> the ids that an update writes to its row, each run from the first column on."""
    update = cache.take_update()
    assert not update.starts.any()
    ids = iter(update.block_ids.tolist())
    rows = zip(update.slots.tolist(), update.lengths.tolist(), strict=True)
    found = {slot: [next(ids) for _ in range(length)] for slot, length in rows}
    assert list(ids) == []
    return found


def test_rows_of_admissions_are_reported_as_the_table_holds_them() -> None:
    cache = GroupCache(GroupSpec(4), 20, 5, 40)
    held = cache.pool.allocate(2)
    assert cache.admit(3, held, 9, True) == 3
    assert cache.admit(1, [], 4, False) == 1
    rows = reported(cache)
    assert rows == {slot: cache.table[slot, : len(row)].tolist() for slot, row in rows.items()}
    assert list(rows) == [3, 1]
    assert rows[3][:2] == held
    assert [len(row) for row in rows.values()] == [3, 1]
    assert reported(cache) == {}


def test_slots_that_were_given_up_again_are_not_reported() -> None:
    cache = GroupCache(GroupSpec(4), 20, 5, 40)
    for slot in (0, 2, 4):
        cache.admit(slot, [], 4 * slot + 1, True)
    cache.release(2)
    assert {slot: len(row) for slot, row in reported(cache).items()} == {0: 1, 4: 5}
    cache.check_integrity()


def test_only_blocks_that_may_be_shared_are_offered() -> None:
    cache = GroupCache(GroupSpec(4), 20, 5, 40)
    cache.admit(0, [], 9, True)
    cache.admit(1, [], 9, False)
    assert cache.num_published_np[0] == 0
    assert cache.num_published_np[1] > 40 // 4
