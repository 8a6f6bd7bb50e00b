"""Cache blocks of all groups together: a request gets what it needs in every group, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core_runner.request import Request
from core_runner.scheduling.group_cache import GroupCache
from core_runner.scheduling.output import BlockUpdate, IntArray
from core_runner.scheduling.prefix_cache import GroupSpec, PrefixCache, PrefixHit

_ENDLESS = 2**31 - 1
# That each slot has blocks for, while the pools are roomy: a step that hands blocks out takes the host twice as long.
_TOKENS_AHEAD = 64


class CacheManager:
    """Block lists by slot for each cache group.

    num_blocks: blocks of each group's pool, null block included. max_chunk: most tokens of a row in one step.
    share_prompts: completions of one prompt share its blocks, also without prefix caching.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: Sequence[int],
        *,
        max_num_reqs: int,
        max_model_len: int,
        max_chunk: int,
        enable_prefix_caching: bool,
        share_prompts: bool = True,
    ) -> None:
        pairs = zip(groups, num_blocks, strict=True)
        self.groups = [GroupCache(spec, num, max_num_reqs, max_model_len) for spec, num in pairs]
        self._max_chunk = max_chunk
        self.has_windows = any(group.spec.sliding_window is not None for group in self.groups)
        # Tokens that the blocks of a slot cover in every group, [R].
        self._num_covered_np = np.zeros(max_num_reqs, np.int32)
        self._ahead = max(_TOKENS_AHEAD, *(group.spec.block_size for group in self.groups), 0)
        # A model without cache groups (pure recurrent state) has nothing to hit.
        self.enable_prefix_caching = enable_prefix_caching and bool(self.groups)
        self._share_prompts = share_prompts and bool(self.groups)
        self._prefix = PrefixCache(groups, [group.pool for group in self.groups])

    @property
    def alignment(self) -> int:
        """Tokens that every prefix hit is a multiple of."""
        return self._prefix.alignment

    @property
    def num_cached_blocks(self) -> tuple[int, ...]:
        """Blocks of each group that can be hit, held or free."""
        return tuple(group.pool.num_cached for group in self.groups)

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Free blocks of each group."""
        return tuple(group.pool.num_free for group in self.groups)

    def find_shortage(self, num_tokens: int) -> tuple[int, int, int] | None:
        """(group, blocks needed, blocks there are) of a group that cannot hold `num_tokens` even alone."""
        for idx, group in enumerate(self.groups):
            needed, usable = group.peak_blocks(num_tokens, self._max_chunk), group.pool.num_blocks - 1
            if needed > usable:
                return idx, needed, usable
        return None

    def max_tokens_alone(self, limit: int) -> int:
        """Most computed tokens, up to `limit`, that one request alone can hold in every group."""
        for group in self.groups:
            usable = group.pool.num_blocks - 1
            if group.peak_blocks(limit, self._max_chunk) > usable:
                limit = usable * group.spec.block_size
        return limit

    def is_cacheable(self, request: Request) -> bool:
        """Whether the request's blocks may be shared, with whomever."""
        return (request.group is not None and self._share_prompts) or self._is_public(request)

    def _is_public(self, request: Request) -> bool:
        """Whether everybody may hit the blocks: tokens alone do not describe a request with model inputs, keys do.

        No key says what is in a state that a request brought along.
        """
        if request.model_inputs and request.num_restored_tokens:
            return False
        return self.enable_prefix_caching and (not request.model_inputs or bool(request.input_keys))

    def join_group(self, request: Request) -> None:
        """Settle how a request that has come shares blocks with the other completions of its prompt."""
        if request.group is None or self._is_public(request):
            return
        if self._share_prompts:
            request.cache_salt += request.group.salt
        else:
            # There is nothing to wait for.
            request.group.is_computed = True

    def get_hit(self, request: Request) -> PrefixHit:
        """Longest prefix of the known tokens that is in every group's cache, or that the request brings the state of;
        nothing changes.
        """
        hit = self._prefix.find(request) if self.is_cacheable(request) else self._prefix.no_hit
        restored = request.num_restored_tokens if request.model_inputs else 0
        if hit.num_tokens < restored <= request.max_hit_len:
            # Its last block is a new one, which the model state fills.
            hit = PrefixHit(restored, tuple([0] * g.spec.num_unseen_blocks(restored) for g in self.groups))
        return hit

    def can_admit(self, num_tokens: int, hit: PrefixHit, headroom: int) -> bool:
        """Whether the whole prefill fits now, with `headroom` blocks left over in each group.

        A hit block that is free now leaves the free list as a new one does; only shared ones cost nothing.
        """
        for group, hit_ids in zip(self.groups, hit.block_ids, strict=True):
            pool, needed = group.pool, group.peak_blocks(num_tokens, self._max_chunk) + headroom
            if hit_ids:
                needed -= sum(map(pool.is_held, hit_ids))
            if needed > pool.num_free:
                return False
        return True

    def admit(self, slot: int, request: Request, hit: PrefixHit, num_tokens: int) -> None:
        """Give a free slot the hit's blocks and new ones for its first `num_tokens` tokens."""
        is_offered, covered = self.is_cacheable(request), _ENDLESS
        for group, hit_ids in zip(self.groups, hit.block_ids, strict=True):
            num_blocks = group.admit(slot, hit_ids, num_tokens, is_offered)
            covered = min(covered, num_blocks * group.spec.block_size)
        self._num_covered_np[slot] = covered

    def grow(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Cover the first `num_tokens[i]` tokens of every slot in every group, or change nothing: False."""
        return self._grow(slots, num_tokens, roomy=False)

    def grow_ahead(self, slots: IntArray, num_tokens: IntArray, limits: IntArray) -> bool:
        """`grow`, and where a quarter of every pool stays free by some blocks more for each slot, up to `limits[i]`
        tokens: then the rows of many steps need none.
        """
        if (num_tokens <= self._num_covered_np[slots]).all():
            return True
        ahead = np.maximum(np.minimum(num_tokens + self._ahead, limits), num_tokens)
        return self._grow(slots, ahead, roomy=True) or self._grow(slots, num_tokens, roomy=False)

    def num_steps_covered(self, slots: IntArray, num_tokens: IntArray) -> int:
        """How many tokens each of these slots can at least grow by without a further block."""
        if not self.groups:
            return _ENDLESS
        return int((self._num_covered_np[slots] - num_tokens).min())

    def _grow(self, slots: IntArray, num_tokens: IntArray, roomy: bool) -> bool:
        # All groups are asked before any gives: half a growth could not be taken back.
        missing = [group.num_missing(slots, num_tokens) for group in self.groups]
        for group, num_missing in zip(self.groups, missing, strict=True):
            kept = group.pool.num_blocks // 4 if roomy else 0
            if int(num_missing.sum()) > group.pool.num_free - kept:
                return False
        for group, num_missing in zip(self.groups, missing, strict=True):
            group.append(slots, num_missing)
        self._recount(slots)
        return True

    def _recount(self, slots: IntArray) -> None:
        covered = [group.num_blocks_np[slots] * group.spec.block_size for group in self.groups]
        self._num_covered_np[slots] = np.minimum.reduce(covered) if covered else _ENDLESS

    def give_back_unseen(self, slots: IntArray, num_computed: IntArray) -> None:
        """Free blocks of window groups that no token from `num_computed[i]` on can see."""
        for group in self.groups:
            group.give_back_unseen(slots, num_computed)

    def release(self, slot: int) -> None:
        """Free every block of a slot; published ones stay hit-able until they are given out again."""
        for group in self.groups:
            group.release(slot)
        self._num_covered_np[slot] = 0

    def has_unpublished(self, slots: IntArray, num_tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Slots of whose first `num_tokens[i]` tokens `publish` would offer something, [n]."""
        found = np.zeros(len(slots), np.bool_)
        for group in self.groups:
            found |= group.num_published_np[slots] < num_tokens // group.spec.block_size
        return found

    def publish(self, slot: int, request: Request, num_tokens: int) -> None:
        """Offer the full blocks of the first `num_tokens` tokens, which are known and scheduled."""
        for group_idx, group in enumerate(self.groups):
            first, last = int(group.num_published_np[slot]), num_tokens // group.spec.block_size
            if first < last:
                # A window group may have given blocks back already.
                self._prefix.publish(request, group_idx, first, group.table[slot, first:last].tolist())
                group.num_published_np[slot] = last

    def forget(self, request: Request) -> None:
        """Stop offering every block that this request computed or relied on: its numbers cannot be trusted."""
        self._prefix.forget(request)

    def forget_own(self, request: Request) -> None:
        """Stop offering the blocks that this request computed; what it was given by its first hit stays."""
        if request.num_cached_tokens >= 0:  # it has run at all
            self._prefix.forget(request, request.num_cached_tokens)

    def take_updates(self) -> list[BlockUpdate]:
        """Block-table changes since the last call, one per group."""
        return [group.take_update() for group in self.groups]

    def check_integrity(self) -> None:
        """Recount every group."""
        for group in self.groups:
            group.check_integrity()
