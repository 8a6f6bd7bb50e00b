"""Longest hits over one and several cache groups, against a search over every length."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from core_runner.request import Request
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.block_pool import BlockPool
from core_runner.scheduling.prefix_cache import GroupSpec, PrefixCache


def make_request(length, salt="", seed=0):
    ids = np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)
    return Request("r", ids, SamplingParams(cache_salt=salt))


def longest_by_search(groups, published, num_tokens):
    """The definition: the largest usable multiple of every block size for which all visible blocks are there."""

    def is_hit(group, blocks, length):
        first = 0
        if group.sliding_window is not None:
            first = max(0, length - group.sliding_window + 1) // group.block_size
        return all(idx in blocks for idx in range(first, length // group.block_size))

    for length in range(num_tokens - 1, 0, -1):
        aligned = all(length % group.block_size == 0 for group in groups)
        if aligned and all(is_hit(g, b, length) for g, b in zip(groups, published, strict=True)):
            return length
    return 0


@pytest.mark.parametrize(
    "groups",
    [
        [GroupSpec(4)],
        [GroupSpec(4, 6)],
        [GroupSpec(4, 1)],
        [GroupSpec(4), GroupSpec(4, 9)],
        [GroupSpec(4, 5), GroupSpec(8, 11), GroupSpec(2)],
    ],
)
def test_hit_is_the_longest_that_all_groups_agree_on(groups):
    rng = np.random.default_rng(1)
    num_found = 0
    for trial in range(300):
        request = make_request(int(rng.integers(1, 40)))
        pools = [BlockPool(64) for _ in groups]
        cache = PrefixCache(groups, pools)
        published = []
        for idx, (group, pool) in enumerate(zip(groups, pools, strict=True)):
            full = request.num_tokens // group.block_size
            chosen = {i for i in range(full) if rng.random() < (0.95 if trial % 2 else 0.6)}
            for block_idx in chosen:
                cache.publish(request, idx, block_idx, pool.allocate(1))
            published.append(chosen)
        again = Request("again", request.prompt_token_ids, SamplingParams())
        hit = cache.find(again)
        assert hit.num_tokens == longest_by_search(groups, published, request.num_tokens)
        num_found += hit.num_tokens > 0
        for group, ids in zip(groups, hit.block_ids, strict=True):
            unseen = group.num_unseen_blocks(hit.num_tokens)
            assert len(ids) == hit.num_tokens // group.block_size
            assert [i == 0 for i in ids] == [i < unseen for i in range(len(ids))]
    assert num_found > 30


def test_hash_covers_salt_parent_and_order():
    pool = BlockPool(64)
    cache = PrefixCache([GroupSpec(4)], [pool])
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    variants = [(ids, ""), (ids, "s"), ([9, *ids[1:]], ""), ([2, 1, *ids[2:]], ""), ([*ids[:7], 9], "")]
    seen = set()
    for tokens, salt in variants:
        request = Request("r", np.array(tokens), SamplingParams(cache_salt=salt))
        cache.publish(request, 0, 1, pool.allocate(1))
        seen.add(request.block_hashes[4][1])
    assert len(seen) == len(variants)


def test_chain_grows_with_the_tokens():
    """Hashes made chunk by chunk, across the end of the prompt, equal those of the whole."""
    whole = make_request(30)
    pool = BlockPool(64)
    cache = PrefixCache([GroupSpec(4)], [pool])
    cache.publish(whole, 0, 6, pool.allocate(1))
    for cut in (1, 3, 4, 13, 29):
        parts = Request("p", whole.prompt_token_ids[:cut], SamplingParams())
        for length, token in itertools.islice(enumerate(whole.prompt_token_ids.tolist()), cut, None):
            cache.find(parts)
            assert parts.num_tokens == length
            parts.output_token_ids.append(token)
        cache.find(parts)
        assert parts.block_hashes[4] == whole.block_hashes[4]
