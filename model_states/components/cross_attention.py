"""`CrossAttention`: keys and values of encoder outputs, in a pool of entries that requests share by content."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from model_states.attention import AttentionSpec
from model_states.batch import InputBatch, RemoveReason, RequestInputs, RequestView
from model_states.components.entry_pool import EntryPool
from model_states.config import ModelConfig
from model_states.errors import CapabilityError
from model_states.hookspecs import hookimpl
from model_states.interface import Component
from model_states.kernels.cross_attention import CrossRows, cross_attention, scratch_size
from model_states.kernels.write_entries import write_entries
from model_states.staged import HostToDevice, StagedTensor

logger = logging.getLogger(__name__)

KEY_NAME: Final = "encoder"
# Of a model state that has this component.
ENCODER_OPTIONS: Final[Mapping[str, str]] = {
    "encoder_entries": "encoder outputs that are kept at once, an integer of at least 1",
    "encoder_batch": "encoder inputs that are run at once and at most in a step, an integer of at least 1",
}
_DEFAULT_BATCH: Final = 16
_GPU_SHARE: Final = 0.4  # of the free memory, where the number of entries is not given
_CPU_BYTES: Final = 4 << 30


class Encoder(Protocol):
    """What runs once for each distinct model input; it keeps nothing of them."""

    max_positions: int  # of one output

    def content_key(self, model_inputs: Mapping[str, Any]) -> bytes:
        """Bytes that name the inputs' content; `ValueError`, saying how to fix it, if they cannot be served."""

    def num_positions(self, model_inputs: Mapping[str, Any]) -> int:
        """Positions of the output, in [1, max_positions]."""

    def largest_inputs(self) -> Mapping[str, Any]:
        """Inputs that take as much memory as any, to measure it."""

    def encode(self, inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Hidden states [n, num_positions of the longest, hidden_size]; what lies behind a shorter one is nobody's.

        Must not wait for the device.
        """


# Key and value [n, num_positions, num_kv_heads, head_size] of one decoder layer, from the encoder's hidden states.
Projection = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _Fill(NamedTuple):
    """An entry whose content is not there yet."""

    key: bytes
    entry: int
    model_inputs: Mapping[str, Any]


class CrossAttentionLayer:
    """One decoder layer's pool, and attention over the entries of the step's rows."""

    def __init__(self, owner: CrossAttention, key_pool: torch.Tensor, value_pool: torch.Tensor) -> None:
        self._owner = owner
        self.key_pool, self.value_pool = key_pool, value_pool

    def __call__(self, query: torch.Tensor) -> torch.Tensor:
        """Attend with query [num_tokens, num_heads, head_size]; returns the same shape."""
        owner, out = self._owner, torch.empty_like(query, memory_format=torch.contiguous_format)
        assert owner.rows is not None, "a cross attention layer was called outside a step"
        scale, scratch = owner.spec.scale, owner.scratch
        cross_attention(out, query, self.key_pool, self.value_pool, owner.rows, scale, scratch)
        return out

    def write(self, entries: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key and value [n, num_positions, num_kv_heads, head_size] to entries int64 [n]."""
        write_entries(self.key_pool, entries, key)
        write_entries(self.value_pool, entries, value)


class CrossAttention(Component):
    """Runs the encoder once for each distinct input, and lets every step's rows attend over what it gave.

    An entry holds the keys and values of one encoder output for all layers, `max_positions` of them: the pool has a
    fixed number of entries, beside the caches that the runner sizes. Requests with equal inputs share an entry; it is
    held while one of them has a slot, and kept after that until its room is wanted, so that a preempted request finds
    it again. Rows find their entry by slot on the device, so a recorded step serves any requests.

    num_encoded: inputs that the encoder has run on, for statistics.
    """

    records_step = True

    def __init__(
        self, config: ModelConfig, spec: AttentionSpec, encoder: Encoder, projections: Sequence[Projection]
    ) -> None:
        """spec: heads and scale of every layer. projections: one for each layer, in order.

        The pool is allocated here, so that the runner's own caches get what is left. Its size and that of a batch
        come from `ENCODER_OPTIONS`.
        """
        self.spec, self.encoder = spec, encoder
        self._projections = projections
        self._batch_size = _option(config, "encoder_batch") or _DEFAULT_BATCH
        values_of_layer = 2 * spec.num_kv_heads * encoder.max_positions * spec.head_size
        entry_bytes = len(projections) * values_of_layer * config.dtype.itemsize
        num_entries = _option(config, "encoder_entries") or _choose_num_entries(config, entry_bytes)
        logger.info("encoder outputs: %d entries of %.1f MiB", num_entries, entry_bytes / 2**20)
        self.pool = EntryPool(num_entries, self._batch_size)
        shape = (2, num_entries + 1, spec.num_kv_heads, encoder.max_positions, spec.head_size)
        pools = (torch.empty(shape, dtype=config.dtype, device=config.device) for _ in projections)
        self.layers = [CrossAttentionLayer(self, keys, values) for keys, values in pools]
        self.num_encoded = 0
        # Row 0: entry of each slot; row 1: positions of it. The null slot looks at none.
        self._table = StagedTensor((2, config.max_num_reqs + 1), torch.int32, config.device)
        self._entries, self._lengths = self._table.tensor
        self._keys: dict[int, bytes] = {}
        self._fills: list[_Fill] = []
        self._transfer = HostToDevice(config.device)
        self._fill_entries = torch.zeros(self._batch_size, dtype=torch.int64, device=config.device)
        self.rows: CrossRows | None = None
        counts = range(1, config.max_num_reqs + 1)
        most = max(scratch_size(count, spec.num_heads, spec.head_size) for count in counts)
        self.scratch = torch.empty(most, dtype=torch.float32, device=config.device)

    @hookimpl
    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> Mapping[str, torch.Tensor]:
        """The forward takes no more arguments; but a largest encoder batch must fit too, so it is run here."""
        hidden_states = self.encoder.encode([self.encoder.largest_inputs()] * self._batch_size)
        self._projections[0](hidden_states)
        return {}

    @hookimpl
    def input_keys(self, request: RequestInputs) -> Mapping[str, bytes]:
        """The content of the encoder's input."""
        return {KEY_NAME: self.encoder.content_key(request.model_inputs)}

    @hookimpl
    def reserve(self, request: RequestInputs) -> Mapping[str, str]:
        """An entry, within the step's budget of encoder runs."""
        shortage = self.pool.reserve(self._key(request))
        return {} if shortage is None else {"encoder entries": shortage}

    @hookimpl
    def add_request(self, slot: int, request: RequestView) -> None:
        """Hold the request's entry; a new one is filled by the next `run_encoder`."""
        key = self._key(request)
        entry, is_new = self.pool.take(key)
        self._keys[slot] = key
        if is_new:
            self._fills.append(_Fill(key, entry, request.model_inputs))
        self._table.stage(0, slot, entry)
        self._table.stage(1, slot, self.encoder.num_positions(request.model_inputs))

    @hookimpl
    def remove_request(self, slot: int, reason: RemoveReason) -> None:
        """Let go of the slot's entry; launched steps read it before anything later overwrites it."""
        self.pool.release(self._keys.pop(slot))
        self._fills = [fill for fill in self._fills if self.pool.is_held(fill.key)]

    @hookimpl
    def apply_staged_writes(self) -> None:
        """Send new rows of the table; what was set aside for this step has been taken by now."""
        self.pool.drop_reservations()
        self._table.apply()

    @hookimpl
    def run_encoder(self, batch: InputBatch) -> None:
        """Fill the entries that were taken anew."""
        fills, self._fills = self._fills, []
        for first in range(0, len(fills), self._batch_size):
            self._fill(fills[first : first + self._batch_size])

    @hookimpl
    def prepare_attn(self, batch: InputBatch) -> None:
        """Where the layers find this step's rows."""
        starts, longest = batch.query_start_loc, batch.max_query_len
        self.rows = CrossRows(batch.idx_mapping, starts, self._entries, self._lengths, longest)

    def _fill(self, fills: Sequence[_Fill]) -> None:
        entries = self._fill_entries[: len(fills)]
        self._transfer.copy(np.array([fill.entry for fill in fills]), entries)
        hidden_states = self.encoder.encode([fill.model_inputs for fill in fills])
        for layer, project in zip(self.layers, self._projections, strict=True):
            layer.write(entries, *project(hidden_states))
        for fill in fills:
            self.pool.set_filled(fill.key)
        self.num_encoded += len(fills)

    def _key(self, request: RequestInputs) -> bytes:
        return request.input_keys.get(KEY_NAME) or self.encoder.content_key(request.model_inputs)


def content_key(value: Any, given: Any = None) -> bytes:
    """Name of an encoder input's content.

    value: an array, or a tensor. given: a name by which the caller vouches for the content, or None. What lies on a
    device gets a name of its own, which nothing else shares: to read it would wait for the device.
    """
    if given is not None:
        if not isinstance(given, str) or not given:
            raise ValueError(f"key={given!r} must be a string that no other content has, or be left out")
        return b"given:" + given.encode()
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return b"unique:" + secrets.token_bytes(16)
        value = value.numpy()
    array = np.ascontiguousarray(value)
    digest = sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


def _option(config: ModelConfig, name: str) -> int | None:
    value = config.options.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CapabilityError(f"model_options: {name}={value!r} must be an integer of at least 1")
    return value


def _choose_num_entries(config: ModelConfig, entry_bytes: int) -> int:
    """One for each slot and some to keep, or what memory allows."""
    wanted = config.max_num_reqs + -(-config.max_num_reqs // 4)
    room = _CPU_BYTES
    if config.device.type == "cuda":
        room = int(torch.cuda.mem_get_info(config.device)[0] * _GPU_SHARE)
    affordable = room // entry_bytes - 1
    if affordable < 1:
        raise CapabilityError(
            f"an encoder output takes {entry_bytes / 2**20:.0f} MiB, and {room / 2**20:.0f} MiB are there for them; "
            "free memory, or set model_options={'encoder_entries': 1}"
        )
    return min(wanted, affordable)
