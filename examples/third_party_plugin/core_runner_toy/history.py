"""`TokenHistory`: a component that keeps token ids in a paged cache and looks some positions back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_states import CacheGroup, Caches, CacheTensor, Component, InputBatch, ModelConfig, hookimpl

GROUP = "history"


class TokenHistory(Component):
    """Gives the forward the input `lagged`: for every token of the step, the one `lag` positions before it."""

    def __init__(self, config: ModelConfig, lag: int) -> None:
        self.lag = lag
        self.block_size = config.block_size
        self.inputs = torch.zeros(config.max_num_batched_tokens, dtype=torch.int64, device=config.device)

    @hookimpl
    def cache_groups(self) -> list[CacheGroup]:
        """One group with one int64 per token."""
        ids = CacheTensor(block_shape=(self.block_size,), dtype=torch.int64)
        return [CacheGroup(GROUP, self.block_size, {"tokens": {"ids": ids}})]

    @hookimpl
    def init_caches(self, caches: Caches) -> None:
        """Keep the cache [num_blocks, block_size] and the place of its block table."""
        self.cache = caches[GROUP]["tokens"]["ids"]
        self.group = list(caches).index(GROUP)

    @hookimpl
    def preprocess_state(self, batch: InputBatch) -> None:
        """Write the step's tokens; padding, mapped to -1, goes to the null block."""
        places = batch.slot_mappings[self.group].clamp(min=0)
        self.cache.view(-1)[places] = batch.input_ids

    @hookimpl
    def prepare_inputs(self, batch: InputBatch) -> Mapping[str, torch.Tensor]:
        """`lagged`, int64 [num_tokens_padded]."""
        tokens = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
        table = batch.block_tables[self.group]
        rows = torch.searchsorted(batch.query_start_loc, tokens, right=True) - 1
        position = (batch.positions - self.lag).clamp(0, table.shape[1] * self.block_size - 1)
        blocks = table[rows.clamp(0, len(table) - 1), position // self.block_size].long()
        lagged = self.cache[blocks, position % self.block_size]
        out = self.inputs[: len(tokens)]
        out.copy_(torch.where(batch.positions >= self.lag, lagged, 0))
        return {"lagged": out}

    @hookimpl
    def prepare_dummy_inputs(self, num_tokens: int) -> Mapping[str, torch.Tensor]:
        """The same buffer as `prepare_inputs`."""
        return {"lagged": self.inputs[:num_tokens]}
