"""`PagedAttention`: keys and values of self-attention layers in paged caches, one cache group per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from model_states.attention import AttentionBackend, AttentionMetadata, AttentionSpec, select_backend
from model_states.batch import InputBatch
from model_states.cache import CacheGroup, Caches, CacheTensor
from model_states.components.saved_state import SavedRows, StatePart
from model_states.config import ModelConfig
from model_states.hookspecs import hookimpl


@dataclass(slots=True)
class _GroupState:
    """What the layers of one group share: this step's metadata, renewed in `prepare_attn`.

    entries: "layer.tensor" -> its cache as one row for each token, [num_blocks * block_size, ...].
    """

    group: CacheGroup
    index: int = 0  # of the group's tensors in `InputBatch.block_tables`
    metadata: AttentionMetadata | None = None
    entries: dict[str, torch.Tensor] = field(default_factory=dict)

    def saved_rows(self, num_tokens: int) -> SavedRows:
        """The entries of these tokens that a next one can see."""
        window = self.group.sliding_window
        first = 0 if window is None else max(0, num_tokens - window + 1)
        return SavedRows(self.index, range(first, num_tokens), self.group.block_size, self.entries)


class AttentionLayer:
    """One layer's attention over its paged cache; a model calls it with the step's new tokens."""

    def __init__(self, name: str, spec: AttentionSpec, backend: AttentionBackend, state: _GroupState) -> None:
        self.name = name
        self.spec = spec
        self._backend = backend
        self._state = state
        self.key_cache = self.value_cache = torch.empty(0)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write key and value to the cache, then attend over it.

        query [num_tokens, num_heads, head_size], key [num_tokens, num_kv_heads, head_size], value [.., head_size_v]
        (None with `value_from_key`); returns [num_tokens, num_heads, head_size_v]. sinks: fp logits [num_heads].
        """
        self._backend.write_cache(key, value, self.key_cache, self.value_cache, self.slot_mapping)
        return self.attend(query, sinks)

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Cache positions of this step's tokens, int64 [num_tokens], -1 for padding."""
        return self.metadata.slot_mapping

    def attend(self, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend over a cache to which this step's keys and values have been written at `slot_mapping`.

        query [num_tokens, num_heads, head_size]; returns [num_tokens, num_heads, head_size_v].
        """
        return self._backend.attend(query, self.key_cache, self.value_cache, self.metadata, self.spec, sinks)

    @property
    def metadata(self) -> AttentionMetadata:
        """Of this step, for kernels that do more than attend."""
        metadata = self._state.metadata
        assert metadata is not None, f"attention layer {self.name} was called outside a step"
        return metadata


class PagedAttention(StatePart):
    """Self-attention state of a decoder, for any mix of windows and head layouts.

    Layers with the same window, kv heads and head sizes share a cache group. A window that is no shorter than
    `max_model_len` hides nothing and counts as none.
    """

    records_step = True

    def __init__(
        self, config: ModelConfig, specs: Sequence[AttentionSpec], prefix: str = "attention"
    ) -> None:
        """`specs[i]` describes layer i; `prefix` keeps group names apart when a model has several such components."""
        self.backend = select_backend(
            config.attention_backend, specs, config.block_size, config.dtype, config.device
        )
        self._groups: dict[str, _GroupState] = {}
        layout: dict[str, list[tuple[str, AttentionSpec]]] = {}
        for index, spec in enumerate(specs):
            window = spec.sliding_window
            window = None if window is None or window >= config.max_model_len else window
            kind = "full" if window is None else f"window{window}"
            group_name = f"{prefix}.{kind}.{spec.num_kv_heads}x{spec.head_size}x{spec.head_size_v}"
            layout.setdefault(group_name, []).append((f"{prefix}.{index}", spec))
            if group_name not in self._groups:
                self._groups[group_name] = _GroupState(CacheGroup(group_name, config.block_size, {}, window))
        self.layers: list[AttentionLayer] = []
        for group_name, members in layout.items():
            state = self._groups[group_name]
            tensors = {name: _cache_tensors(spec, config) for name, spec in members}
            state.group = CacheGroup(group_name, config.block_size, tensors, state.group.sliding_window)
            self.layers += [AttentionLayer(name, spec, self.backend, state) for name, spec in members]
        self.layers.sort(key=lambda layer: int(layer.name.rsplit(".", 1)[1]))

    @hookimpl
    def cache_groups(self) -> list[CacheGroup]:
        """One group per distinct layout and window."""
        return [state.group for state in self._groups.values()]

    @hookimpl
    def init_caches(self, caches: Caches) -> None:
        """Hand every layer its key and value tensors; remember where each group stands in a batch."""
        order = list(caches)
        for name, state in self._groups.items():
            state.index = order.index(name)
            state.entries = {
                f"{layer}.{tensor}": cache.flatten(0, 1)
                for layer, tensors in caches[name].items()
                for tensor, cache in tensors.items()
            }
        for layer in self.layers:
            tensors = caches[layer._state.group.name][layer.name]
            layer.key_cache = tensors["key"]
            layer.value_cache = (
                layer.key_cache[..., : layer.spec.head_size_v]
                if layer.spec.value_from_key
                else tensors["value"]
            )

    def saved_rows(self, num_tokens: int) -> list[SavedRows]:
        """Keys and values of a request that has computed so many tokens."""
        return [state.saved_rows(num_tokens) for state in self._groups.values()]

    @hookimpl
    def prepare_attn(self, batch: InputBatch) -> None:
        """Point every group at this step's lengths, block table and slot mapping."""
        for state in self._groups.values():
            state.metadata = AttentionMetadata(
                query_start_loc=batch.query_start_loc,
                seq_lens=batch.seq_lens,
                block_table=batch.block_tables[state.index],
                slot_mapping=batch.slot_mappings[state.index],
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
            )


def _cache_tensors(spec: AttentionSpec, config: ModelConfig) -> dict[str, CacheTensor]:
    rows = (config.block_size, spec.num_kv_heads)
    tensors = {"key": CacheTensor((*rows, spec.head_size), config.dtype)}
    if not spec.value_from_key:
        tensors["value"] = CacheTensor((*rows, spec.head_size_v), config.dtype)
    return tensors
