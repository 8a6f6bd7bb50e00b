"""`choose_num_blocks`: who gets how much of the memory for caches."""

from __future__ import annotations

import pytest
import torch

from core_runner import ModelRunner, RunnerConfig
from core_runner.cache_sizes import choose_num_blocks
from core_runner.errors import ConfigError
from model_states import CacheGroup, CacheTensor


def group(
    name: str, block_size: int, num_bytes: int, window: int | None = None, scratch: int = 0
) -> CacheGroup:
    tensor = CacheTensor((num_bytes,), torch.int8)
    return CacheGroup(name, block_size, {"0": {"x": tensor}}, window, scratch)


CONFIG = RunnerConfig(max_num_reqs=4, max_num_batched_tokens=32)


def test_every_slot_at_full_length_is_the_most() -> None:
    groups = [group("full", 16, 10), group("other", 8, 10)]
    assert choose_num_blocks(CONFIG, groups, 100, 10**6) == [4 * 7 + 1, 4 * 13 + 1]


def test_a_window_needs_a_bounded_number() -> None:
    # The window's block, the next and one to keep for each of 4 requests, and the 2 blocks of a step's tokens.
    assert choose_num_blocks(CONFIG, [group("state", 16, 10, window=2)], 10**6, 10**6) == [4 * 3 + 2 + 1]
    assert choose_num_blocks(CONFIG, [group("state", 16, 10, window=2)], 20, 10**6) == [4 * 2 + 1]


def test_windows_come_first_with_at_most_half() -> None:
    groups = [group("full", 16, 10), group("state", 16, 1000, window=2)]
    full, state = choose_num_blocks(CONFIG, groups, 10**6, 40_000)
    assert state == 4 * 3 + 2 + 1
    assert full == (40_000 - 15_000) // 10
    full, state = choose_num_blocks(CONFIG, groups, 10**6, 20_000)
    assert (full, state) == (1000, 10)


def test_scratch_is_taken_off_first() -> None:
    assert choose_num_blocks(CONFIG, [group("state", 16, 100, 2, scratch=5)], 10**6, 1500) == [10]


def test_groups_without_window_share_evenly() -> None:
    counts = choose_num_blocks(CONFIG, [group("a", 16, 10), group("b", 16, 30)], 10**6, 4000)
    assert counts == [100, 100]


def test_configured_numbers_and_no_groups() -> None:
    config = RunnerConfig(num_blocks=7)
    assert choose_num_blocks(config, [group("a", 16, 10)] * 2, 100, 0) == [7, 7]
    assert choose_num_blocks(CONFIG, [], 100, 0) == []


@pytest.mark.parametrize("window", [None, 2])
def test_less_than_a_block_is_an_error(window: int | None) -> None:
    with pytest.raises(ConfigError, match="less than one block"):
        choose_num_blocks(CONFIG, [group("a", 16, 1000, window)], 100, 1999)


def test_caches_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"caches of 1099511627776 blocks of .* lower num_blocks, block_size"
    ):
        ModelRunner(RunnerConfig(device="cpu", max_num_reqs=1, num_blocks=1 << 40))
