"""TOY: a model state without weights whose logits a test sets by hand; it comes as a plugin given by call.

Each token has a key that depends on every token before it and on their places: sum over p of
token[p] * weight(p). With `cached`, earlier tokens are read from a paged cache, so that a wrong block, a lost
write or a poisoned cell changes the key or makes it NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from support.reference import Reference

from model_states import (
    CacheGroup,
    Caches,
    CacheTensor,
    Component,
    InputBatch,
    ModelConfig,
    ModelState,
    RequestView,
    hookimpl,
)

# Logits [n, vocab_size] of keys int64 [n] and positions int64 [n].
Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_GROUP = "toy"


class ToyState(ModelState):
    """Claims `ToyLogitsForCausalLM`. A request whose model inputs hold "stale" reads one cell past its own."""

    name: ClassVar[str] = "toy-logits"
    api_version: ClassVar[int] = 1
    architectures: ClassVar[tuple[str, ...]] = ("ToyLogitsForCausalLM",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"chunked_prefill", "prefix_cache", "graphs"})
    input_names: ClassVar[frozenset[str]] = frozenset({"stale"})
    logits: ClassVar[Logits]
    cached: ClassVar[bool]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.vocab_size = int(config.checkpoint.raw_config["vocab_size"])
        self.block_size = config.block_size
        self.cells_too_many = torch.zeros(config.max_num_reqs + 1, dtype=torch.int64, device=config.device)

    @hookimpl
    def cache_groups(self) -> list[CacheGroup]:
        cell = CacheTensor((self.block_size,), torch.float32)
        return [CacheGroup(_GROUP, self.block_size, {"tokens": {"ids": cell}})] if self.cached else []

    @hookimpl
    def init_caches(self, caches: Caches) -> None:
        self.cache = caches[_GROUP]["tokens"]["ids"] if self.cached else torch.empty(0)

    @hookimpl
    def add_request(self, slot: int, request: RequestView) -> None:
        self.cells_too_many[slot] = int("stale" in request.model_inputs)

    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """Key and position of each token, float32 [num_tokens, 2]."""
        keys = self._keys(batch) if self.cached else batch.positions * 31 + batch.input_ids
        return torch.stack([keys.float(), batch.positions.float()], dim=1)

    def _keys(self, batch: InputBatch) -> torch.Tensor:
        # Of padding: no place, -1, and no row, which is taken for the last one.
        places = batch.slot_mappings[0]
        self.cache.view(-1)[places[places >= 0]] = batch.input_ids[places >= 0].float()
        tokens = torch.arange(len(batch.input_ids), device=places.device)
        rows = torch.searchsorted(batch.query_start_loc, tokens, right=True) - 1
        rows = rows.clamp(max=len(batch.idx_mapping) - 1)
        cells = self.cache[batch.block_tables[0].long()].flatten(1)  # [num_reqs, max_blocks * block_size]
        places = torch.arange(cells.shape[1], device=cells.device)
        last = batch.positions + self.cells_too_many[batch.idx_mapping.long()][rows]
        terms = (cells * weight(places))[rows]
        return torch.where(places <= last[:, None], terms, 0).sum(1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        keys, positions = hidden_states.unbind(1)
        logits = type(self).logits(keys.nan_to_num(0).long(), positions.long())
        return torch.where(keys.isnan()[:, None], torch.nan, logits)


def weight(places: Any) -> Any:
    """Of each place, small enough that sums over 256 tokens are exact in float32."""
    return places * 37 % 101 + 1


class ToyPlugin:
    """What `LLM(plugins=[...])` takes: brings a `ToyState` with these logits."""

    def __init__(self, logits: Logits, *, cached: bool = True) -> None:
        body = {"logits": staticmethod(logits), "cached": cached}
        self.state = type("ToyState", (ToyState,), body)

    @hookimpl
    def register_model_states(self) -> list[type[ModelState]]:
        return [self.state]


class ToyTable:
    """Random logits by key, [num_rows, vocab_size], and what greedy decoding must make of them."""

    def __init__(self, vocab_size: int, *, scale: float = 1.0, seed: int = 0, num_rows: int = 499) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(num_rows, vocab_size, generator=generator)
        self._best = self.table.argmax(1).tolist()

    def __call__(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.table.to(keys.device)[keys % len(self.table)]

    def greedy(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
        """Ids after `prompt`, by the formula alone, up to the first that is in `stop`."""
        return self._walk(prompt, max_tokens, stop)[0]

    def reference(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> Reference:
        """The same with log-probabilities."""
        tokens, rows = self._walk(prompt, max_tokens, stop)
        return Reference(tokens, torch.log_softmax(self.table[rows], -1))

    def _walk(
        self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        key = sum(token * weight(place) for place, token in enumerate(prompt))
        tokens: list[int] = []
        rows: list[int] = []
        while len(tokens) < max_tokens and (not tokens or tokens[-1] not in stop):
            rows.append(key % len(self.table))
            tokens.append(self._best[rows[-1]])
            key += tokens[-1] * weight(len(prompt) + len(tokens) - 1)
        return tokens, rows


def save_toy(directory: Path, vocab_size: int, **config: Any) -> str:
    """Write the toy's model directory and give its name."""
    config = {
        "architectures": ["ToyLogitsForCausalLM"],
        "model_type": "core-runner-test-toy",
        "vocab_size": vocab_size,
        "max_position_embeddings": 256,
        **config,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


class Listener(Component):
    """An extension that reads `audio` and does nothing with it: requests may bring it to any model."""

    input_names = frozenset({"audio"})
