"""How many blocks each cache group gets of the memory that is left for caches."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from core_runner.config import RunnerConfig
from core_runner.errors import ConfigError
from model_states import CacheGroup

logger = logging.getLogger(__name__)


def choose_num_blocks(
    config: RunnerConfig, groups: Sequence[CacheGroup], max_model_len: int, free_bytes: int
) -> list[int]:
    """Blocks of each cache group, null block included: as configured, else what `free_bytes` hold.

    No group gets more than all request slots can use. Groups with a window need a bounded number for a request and
    come first, with at most half of the memory where others follow; those share the rest evenly, block for block.
    Raises `ConfigError` where that is less than a block.
    """
    if config.num_blocks is not None:
        return [config.num_blocks] * len(groups)
    free_bytes -= sum(group.num_scratch_blocks * group.block_bytes for group in groups)
    bounded = [group for group in groups if group.sliding_window is not None]
    unbounded = [group for group in groups if group.sliding_window is None]
    wanted = {group.name: _most_blocks(config, group, max_model_len) for group in groups}
    for members, available in (
        (bounded, free_bytes // 2 if unbounded else free_bytes),
        (unbounded, free_bytes),
    ):
        if not members:
            continue
        # What the bounded groups took is gone for the others.
        available -= sum(wanted[g.name] * g.block_bytes for g in bounded if members is unbounded)
        needed = sum(wanted[group.name] * group.block_bytes for group in members)
        share = min(1.0, available / needed)
        for group in members:
            wanted[group.name] = int(wanted[group.name] * share)
    if any(num < 2 for num in wanted.values()):
        raise ConfigError(
            f"{free_bytes / 2**30:.2f} GiB are free for caches, less than one block of each of {len(groups)} groups; "
            f"raise gpu_memory_utilization (now {config.gpu_memory_utilization}) or lower max_num_batched_tokens"
        )
    for group in groups:
        num_blocks = wanted[group.name]
        logger.info(
            "cache %s: %d blocks of %d tokens, %.2f GiB",
            group.name,
            num_blocks,
            group.block_size,
            num_blocks * group.block_bytes / 2**30,
        )
    return [wanted[group.name] for group in groups]


def _most_blocks(config: RunnerConfig, group: CacheGroup, max_model_len: int) -> int:
    """Blocks that all request slots can use at once, null block included.

    A request with a window holds what the window covers, the block it goes on in, and one more to keep for prefix
    hits; the tokens of a step are shared by all.
    """
    whole = -(-max_model_len // group.block_size)
    if group.sliding_window is None:
        return config.max_num_reqs * whole + 1
    seen = -(-(group.sliding_window - 1) // group.block_size) + 2
    step = -(-config.max_num_batched_tokens // group.block_size)
    return min(config.max_num_reqs * seen + step, config.max_num_reqs * whole) + 1
