"""What is kept of encoder outputs, and attention over it: each layer's keys and values, or the outputs themselves.

Keys and values are quick to attend over, and take 2 * num_layers * num_heads * head_size numbers a position. The
outputs take hidden_size of them, the same for all layers; what the layers' weights make of them is brought to the other
side of the sums (see `kernels/absorbed_attention.py`), which pays off where many rows are read in a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from model_states.attention import AttentionSpec
from model_states.config import ModelConfig
from model_states.errors import CapabilityError
from model_states.kernels.absorbed_attention import absorbed_attention, absorbs
from model_states.kernels.cross_attention import CrossRows, cross_attention
from model_states.kernels.cross_attention_step import scratch_sizes
from model_states.kernels.write_entries import Entries, write_entries

KEPT_OPTIONS: Final = {
    "cross_attention_cache": "what is kept of encoder outputs: 'keys_values' of each layer, 'hidden_states', or 'auto'",
    "cross_attention_dtype": "of kept keys and values: 'int8' halves memory and traffic; 'auto' is the model's",
}
# Slots from which on outputs themselves are attended over sooner than keys and values, by measurement.
_MANY_SLOTS: Final = 32


class Projection(Protocol):
    """What one decoder layer makes of an encoder's output. A bias of keys changes no attention.

    key_weight, value_weight [num_kv_heads, head_size, hidden_size], contiguous; value_bias [num_kv_heads, head_size].
    """

    key_weight: torch.Tensor
    value_weight: torch.Tensor
    value_bias: torch.Tensor | None

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [n, num_positions, num_kv_heads, head_size] of [n, num_positions, hidden_size]."""


class KeptOutputs(Protocol):
    """Entries 1 to n of encoder outputs of all layers; entry 0 is nobody's.

    entry_bytes: that an entry takes.
    """

    entry_bytes: int

    def allocate(self, num_entries: int) -> None:
        """Take the memory."""

    def measure(self, hidden_states: torch.Tensor) -> None:
        """Take the memory that `write` takes for a while."""

    def write(self, hidden_states: torch.Tensor, entries: torch.Tensor, lengths: torch.Tensor) -> None:
        """Keep the first lengths [n] positions of outputs [n, num_positions, hidden_size] in entries, int64 [n]."""

    def prepare(self, rows: CrossRows, num_tokens: int) -> None:
        """Before the layers of a step: its rows, and its tokens with padding."""

    def attend(self, index: int, query: torch.Tensor) -> torch.Tensor:
        """Of layer `index` what query [num_tokens, num_heads, head_size] sees, of the same shape."""

    def keys_and_values(self, index: int, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of layer `index`, each [n, num_kv_heads, max_positions, head_size], in the model's dtype."""


class KeptKeysValues:
    """A pool of keys and one of values for each layer. pools: of layer i, [keys, values]."""

    def __init__(
        self, config: ModelConfig, spec: AttentionSpec, max_positions: int, projections: Sequence[Projection]
    ) -> None:
        """Take no memory yet. Raises `CapabilityError` for options that mean nothing."""
        self._config, self._spec, self._projections = config, spec, projections
        self._shapes = _shapes(spec, max_positions, config)
        sizes = (math.prod(shape) * kind.itemsize for shape, kind in self._shapes)
        self.entry_bytes = 2 * len(projections) * sum(sizes)
        self.pools: list[list[Entries]] = []
        self._rows: CrossRows | None = None
        counts = range(1, config.max_num_reqs + 1)
        sizes_of_steps = [scratch_sizes(count, spec.num_heads, spec.head_size) for count in counts]
        num_values, num_counters = map(max, zip(*sizes_of_steps, strict=True))
        self._scratch = torch.empty(num_values, dtype=torch.float32, device=config.device)
        self._arrived = torch.zeros(num_counters, dtype=torch.int32, device=config.device)

    def allocate(self, num_entries: int) -> None:
        """See `KeptOutputs`."""
        device = self._config.device
        for _ in self._projections:
            pool = [
                torch.empty((2, num_entries + 1, *shape), dtype=kind, device=device)
                for shape, kind in self._shapes
            ]
            self.pools.append([*map(Entries, *pool)])

    def measure(self, hidden_states: torch.Tensor) -> None:
        """See `KeptOutputs`."""
        self._projections[0](hidden_states)

    def write(self, hidden_states: torch.Tensor, entries: torch.Tensor, lengths: torch.Tensor) -> None:
        """See `KeptOutputs`."""
        for pools, project in zip(self.pools, self._projections, strict=True):
            for pool, part in zip(pools, project(hidden_states), strict=True):
                write_entries(pool, entries, lengths, part)

    def prepare(self, rows: CrossRows, num_tokens: int) -> None:
        """See `KeptOutputs`."""
        self._rows = rows

    def attend(self, index: int, query: torch.Tensor) -> torch.Tensor:
        """See `KeptOutputs`."""
        assert self._rows is not None, "a cross attention layer was called outside a step"
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        keys, values = self.pools[index]
        cross_attention(out, query, keys, values, self._rows, self._spec.scale, self._scratch, self._arrived)
        return out

    def keys_and_values(self, index: int, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KeptOutputs`."""
        keys, values = (pool.read(entries).to(self._config.dtype) for pool in self.pools[index])
        return keys, values


class KeptHiddenStates:
    """One pool for all layers: `pool` [num_entries + 1, max_positions, hidden_size]."""

    def __init__(
        self, config: ModelConfig, spec: AttentionSpec, max_positions: int, projections: Sequence[Projection]
    ) -> None:
        """Take no memory yet."""
        self._config, self._spec, self._projections = config, spec, projections
        self._shape = (max_positions, projections[0].key_weight.shape[-1])
        self.entry_bytes = math.prod(self._shape) * config.dtype.itemsize
        self.pool: torch.Tensor
        self._rows: CrossRows | None = None
        self._slots: torch.Tensor

    def allocate(self, num_entries: int) -> None:
        """See `KeptOutputs`."""
        size = (num_entries + 1, *self._shape)
        self.pool = torch.empty(size, dtype=self._config.dtype, device=self._config.device)

    def measure(self, hidden_states: torch.Tensor) -> None:
        """See `KeptOutputs`."""

    def write(self, hidden_states: torch.Tensor, entries: torch.Tensor, lengths: torch.Tensor) -> None:
        """See `KeptOutputs`; what lies behind an output's length is written too, and never read."""
        self.pool[:, : hidden_states.shape[1]].index_copy_(0, entries, hidden_states)

    def prepare(self, rows: CrossRows, num_tokens: int) -> None:
        """See `KeptOutputs`."""
        self._rows, self._slots = rows, rows.token_slots(num_tokens)

    def attend(self, index: int, query: torch.Tensor) -> torch.Tensor:
        """See `KeptOutputs`."""
        rows, project = self._rows, self._projections[index]
        assert rows is not None, "a cross attention layer was called outside a step"
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        weights = project.key_weight, project.value_weight, project.value_bias
        places = self._slots, rows.entries, rows.lengths
        absorbed_attention(out, query, self.pool, *weights, *places, self._spec.scale)
        return out

    def keys_and_values(self, index: int, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KeptOutputs`."""
        key, value = self._projections[index](self.pool[entries])
        return key.transpose(1, 2), value.transpose(1, 2)


def choose_kept_outputs(
    config: ModelConfig, spec: AttentionSpec, max_positions: int, projections: Sequence[Projection]
) -> KeptOutputs:
    """What the options say, or suits the device and the number of slots. `CapabilityError` for what cannot be."""
    name, cache = "cross_attention_cache", config.options.get("cross_attention_cache", "auto")
    if cache not in (None, "auto", "keys_values", "hidden_states"):
        raise CapabilityError(
            f"model_options: {name}={cache!r} must be 'auto', 'keys_values' or 'hidden_states'"
        )
    dtype = config.options.get("cross_attention_dtype")
    hidden_size = projections[0].key_weight.shape[-1]
    has_kernel = absorbs(config.dtype, config.device, spec.num_heads, hidden_size)
    if cache == "hidden_states" and dtype not in (None, "auto"):
        raise CapabilityError(
            f"model_options: {name}='hidden_states' and cross_attention_dtype={dtype!r} exclude each other: the latter "
            "is of keys and values; leave one of them out"
        )
    if cache == "hidden_states" and config.device.type == "cuda" and not has_kernel:
        raise CapabilityError(
            f"model_options: {name}='hidden_states' needs a GPU of compute capability 9.0, a dtype of 16 bits, up to "
            f"24 heads and a hidden size of up to 1280 that eight warps can share, not {config.dtype}, "
            f"{spec.num_heads} heads and {hidden_size}; leave it out"
        )
    if (
        cache in (None, "auto")
        and has_kernel
        and config.max_num_reqs >= _MANY_SLOTS
        and dtype in (None, "auto")
    ):
        cache = "hidden_states"
    kept = KeptHiddenStates if cache == "hidden_states" else KeptKeysValues
    return kept(config, spec, max_positions, projections)


def _shapes(
    spec: AttentionSpec, max_positions: int, config: ModelConfig
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of an entry's keys or values in a layer, and of their scales if they have any."""
    values = (spec.num_kv_heads, max_positions, spec.head_size)
    kind = config.options.get("cross_attention_dtype")
    if kind in (None, "auto"):
        return [(values, config.dtype)]
    if kind != "int8":
        raise CapabilityError(f"model_options: cross_attention_dtype={kind!r} must be 'auto' or 'int8'")
    if spec.head_size % 4:
        raise CapabilityError(
            f"model_options: cross_attention_dtype='int8' needs a head size of a multiple of 4, not {spec.head_size}; "
            "leave it out"
        )
    return [(values, torch.int8), ((spec.num_kv_heads, spec.head_size), torch.float32)]
