"""`EntryPool`: who holds what, what is kept, and what gives way."""

from __future__ import annotations

import random

import pytest

from model_states.components.entry_pool import EntryPool

A, B, C, D = b"a", b"b", b"c", b"d"


def _fill(pool: EntryPool, key: bytes) -> int:
    index, is_new = pool.take(key)
    if is_new:
        pool.set_filled(key, index)
    return index


def test_equal_keys_share_an_entry_until_the_last_lets_go():
    pool = EntryPool(2, 8)
    first = _fill(pool, A)
    assert pool.take(A) == (first, False)
    assert first > 0, "entry 0 is nobody's"
    pool.release(A)
    assert (pool.num_held, pool.num_idle) == (1, 0)
    pool.release(A)
    assert (pool.num_held, pool.num_idle) == (0, 1)
    assert pool.take(A) == (first, False), "its content is still there"


def test_the_entry_that_was_let_go_of_first_gives_way():
    pool = EntryPool(2, 8)
    entries = {key: _fill(pool, key) for key in (A, B)}
    for key in (B, A):
        pool.release(key)
    assert pool.take(C) == (entries[B], True)
    assert pool.take(A) == (entries[A], False)
    with pytest.raises(IndexError, match="all 2 entries are held"):
        pool.take(D)


def test_an_entry_that_was_never_filled_is_not_kept():
    pool = EntryPool(2, 8)
    pool.take(A)
    pool.release(A)
    assert (pool.num_held, pool.num_idle, pool.is_held(A)) == (0, 0, False)
    assert pool.take(A)[1]


def test_a_reservation_keeps_content_and_room_for_a_step():
    pool = EntryPool(2, 8)
    _fill(pool, A)
    pool.release(A)
    assert pool.reserve(A) is None
    assert pool.reserve(A) is None, "once more is no more"
    assert pool.reserve(B) is None
    assert pool.reserve(C) == "all 2 are held"
    assert pool.take(B)[1]
    assert not pool.take(A)[1], "what is set aside does not give way"
    pool.drop_reservations()
    assert pool.reserve(A) is None, "what is held needs no room"
    assert pool.reserve(C) == "all 2 are held"
    pool.release(B)
    assert pool.reserve(C) is None


def test_entries_taken_ahead_displace_nothing_that_is_wanted():
    pool = EntryPool(2, 8)
    for key in (A, B):
        _fill(pool, key)
        pool.release(key)
    assert pool.take_ahead(A, {A}) is None, "it has an entry"
    assert pool.take_ahead(C, {A, B}) is None
    entry = pool.take_ahead(C, {A})
    assert entry is not None
    assert (pool.num_held, pool.is_filled(C), pool.is_filled(A), pool.is_filled(B)) == (1, False, True, False)
    pool.set_filled(C, entry + 1)
    assert not pool.is_filled(C), "another run's"
    pool.set_filled(C, entry)
    pool.release(C)
    assert pool.take(C) == (entry, False)


def test_a_step_fills_no_more_than_its_budget():
    pool = EntryPool(8, 2)
    assert [pool.reserve(key) for key in (A, B, C)] == [None, None, "2 are filled in this step already"]
    for key in (A, B):
        _fill(pool, key)
    pool.drop_reservations()
    assert pool.reserve(A) is None
    assert pool.reserve(C) is None


@pytest.mark.parametrize("seed", range(3))
def test_what_was_reserved_can_be_taken(seed):
    """Random steps of removals, reservations and admissions against a plain model of who holds what."""
    draw, pool, held = random.Random(seed), EntryPool(5, 3), []
    content: dict[int, bytes] = {}
    for _ in range(300):
        keys = [bytes([draw.randrange(9)]) for _ in range(draw.randrange(5))]
        admitted = [key for key in keys if pool.reserve(key) is None]
        for key in [key for key in held if draw.random() < 0.3]:
            held.remove(key)
            pool.release(key)
        for key in admitted:
            index, is_new = pool.take(key)
            held.append(key)
            if is_new:
                content[index] = key
                pool.set_filled(key, index)
            assert content[index] == key
        pool.drop_reservations()
        assert pool.num_held == len(set(held))
        assert pool.num_held + pool.num_idle <= 5
