"""Reference counts, order of reuse, and hits of one pool."""

from __future__ import annotations

import numpy as np
import pytest

from core_runner.scheduling.block_pool import BlockPool


def recount(pool, *holders):
    pool.check_integrity(np.bincount(np.concatenate(holders).astype(int), minlength=pool.num_blocks))


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_tail_of_a_chain_is_reused_first_and_blocks_without_a_hash_before_all():
    pool = BlockPool(6)
    chain, plain = pool.allocate(3), pool.allocate(2)
    for idx, block in enumerate(chain):
        pool.publish([bytes([idx])], [block])
    pool.free(chain)
    pool.free(plain)
    assert set(pool.allocate(2)) == set(plain)
    assert pool.num_cached == 3
    assert pool.allocate(3) == chain[::-1]
    assert pool.num_cached == 0


def test_free_block_stays_hit_able_until_it_is_handed_out():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish([b"a"], [block])
    pool.free([block])
    assert pool.lookup(b"a") == block
    pool.touch([block])
    assert pool.is_held(block)
    assert pool.num_free == 1
    pool.touch([block])
    pool.free([block])
    assert pool.is_held(block)
    recount(pool, [block])
    pool.free([block])
    pool.allocate(2)
    assert pool.lookup(b"a") is None


def test_touched_block_becomes_the_most_recent():
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish([b"1"], [first])
    pool.publish([b"2"], [second])
    pool.free([first])
    pool.free([second])
    pool.touch([first])
    pool.free([first])
    assert pool.allocate(2) == [second, first]


def test_first_block_of_one_content_is_kept():
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish([b"a"], [first])
    pool.publish([b"a"], [second])
    assert pool.lookup(b"a") == first
    pool.free([second])
    pool.free([first])
    pool.forget(b"a")
    assert pool.lookup(b"a") is None
    pool.forget(b"a")
    recount(pool, [])


def test_a_block_is_freed_once():
    pool = BlockPool(3)
    ids = pool.allocate(1)
    pool.free(ids)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(ids)


def test_recount_finds_a_leak():
    pool = BlockPool(4)
    ids = pool.allocate(2)
    recount(pool, ids)
    with pytest.raises(AssertionError, match="counted"):
        recount(pool, ids[:1])
