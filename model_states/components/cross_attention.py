"""`CrossAttention`: encoder outputs, or keys and values of them, in entries that requests share by content."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from model_states.attention import AttentionSpec
from model_states.batch import InputBatch, RemoveReason, RequestInputs, RequestView
from model_states.components.encoder_runs import Encoder, EncoderRuns, Fill
from model_states.components.entry_pool import EntryPool
from model_states.components.kept_outputs import KEPT_OPTIONS, KeptOutputs, Projection, choose_kept_outputs
from model_states.config import ModelConfig
from model_states.errors import CapabilityError
from model_states.hookspecs import hookimpl
from model_states.interface import Component
from model_states.kernels.cross_attention import CrossRows
from model_states.recording import CudaRecorder
from model_states.staged import StagedTensor

logger = logging.getLogger(__name__)

KEY_NAME: Final = "encoder"
# Of a model state that has this component.
ENCODER_OPTIONS: Final[Mapping[str, str]] = {
    "encoder_entries": "encoder outputs that are kept at once, an integer of at least 1",
    "encoder_batch": "encoder inputs that are run at once and at most in a step, an integer of at least 1",
    "encoder_ahead": "encoder runs under way for requests that wait, beside the steps; 0 runs it in the steps",
    **KEPT_OPTIONS,
}
_DEFAULT_BATCH: Final = 16
# Steps between runs of one input, while most slots are taken; a full batch has none after it.
_PAUSE: Final = 24
_GPU_SHARE: Final = 0.4  # of the free memory, where the number of entries is not given
_CPU_BYTES: Final = 4 << 30


class CrossAttentionLayer:
    """One decoder layer's attention over the entries of the step's rows."""

    def __init__(self, kept: KeptOutputs, index: int) -> None:
        self._kept, self._index = kept, index

    def __call__(self, query: torch.Tensor) -> torch.Tensor:
        """Attend with query [num_tokens, num_heads, head_size]; returns the same shape."""
        return self._kept.attend(self._index, query)


class CrossAttention(Component):
    """Runs the encoder once for each distinct input, and lets every step's rows attend over what it gave.

    An entry holds what all layers need of one encoder output (see `kept_outputs`): the pool has a fixed number of them,
    beside the caches that the runner sizes. Requests with equal inputs share an entry; it is held while one of them has
    a slot, and kept after that until its room is wanted, so that a preempted request finds it again. Rows find their
    entry by slot on the device, so a recorded step serves any requests.

    The encoder runs in the step that lets a request in; or, while rows run, ahead for requests that wait, beside the
    steps, and they are let in when it is done.

    max_ahead: the option "encoder_ahead".
    """

    records_step = True
    input_names = None  # the encoder's

    def __init__(
        self, config: ModelConfig, spec: AttentionSpec, encoder: Encoder, projections: Sequence[Projection]
    ) -> None:
        """spec: heads and scale of every layer. projections: one for each layer, in order.

        The pool is allocated here, so that the runner's own caches get what is left. Its size and that of a batch
        come from `ENCODER_OPTIONS`.
        """
        self.encoder = encoder
        self._batch_size = _option(config, "encoder_batch") or _DEFAULT_BATCH
        self.max_ahead = _option(config, "encoder_ahead", least=0) or 0
        self.kept = choose_kept_outputs(config, spec, encoder.max_positions, projections)
        entry_bytes = self.kept.entry_bytes
        num_entries = _option(config, "encoder_entries") or _choose_num_entries(config, entry_bytes)
        logger.info("encoder outputs: %d entries of %.1f MiB", num_entries, entry_bytes / 2**20)
        try:
            self.kept.allocate(num_entries)
        except RuntimeError as error:  # a GPU that is full, and on a CPU nothing more special
            raise CapabilityError(
                f"{num_entries} encoder outputs of {entry_bytes / 2**20:.1f} MiB could not be allocated; "
                "lower model_options={'encoder_entries': ...}"
            ) from error
        self.pool = EntryPool(num_entries, self._batch_size)
        self.layers = [CrossAttentionLayer(self.kept, index) for index in range(len(projections))]
        recorder = (
            CudaRecorder(config.device) if config.cuda_graphs and config.device.type == "cuda" else None
        )
        self.runs = EncoderRuns(encoder, self.kept, config.device, recorder)
        # Row 0: entry of each slot; row 1: positions of it. The null slot looks at none.
        self._table = StagedTensor((2, config.max_num_reqs + 1), torch.int32, config.device)
        self._entries, self._lengths = self._table.tensor
        self._keys: dict[int, bytes] = {}
        self._fills: list[Fill] = []  # of requests that were let in
        self._expected: dict[bytes, Mapping[str, Any]] = {}  # next ones that wait, in order
        self._pause = 0  # steps until the encoder runs for a batch that may not be full
        self._many_rows = -(-3 * config.max_num_reqs // 4)
        self._is_joining = False  # a request was let in before its entry was done
        self._ahead: set[bytes] = set()  # what the encoder runs on for requests that wait

    def find(self, model_inputs: Mapping[str, Any]) -> int | None:
        """Entry that holds what the encoder gave of equal inputs, if it is still there.

        What is launched on the current stream before the next step may read it.
        """
        self._note_filled(self.runs.take_done())
        return self.pool.find(self.encoder.content_key(model_inputs))

    @hookimpl
    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> Mapping[str, torch.Tensor]:
        """The forward takes no more arguments; but a largest encoder batch must fit too, so it is run here."""
        self.runs.measure(self._batch_size)
        return {}

    @hookimpl
    def input_keys(self, request: RequestInputs) -> Mapping[str, bytes]:
        """The content of the encoder's input."""
        return {KEY_NAME: self.encoder.content_key(request.model_inputs)}

    @hookimpl
    def reserve(self, request: RequestInputs) -> Mapping[str, str]:
        """An entry, and while rows run one that is filled; else within the step's budget of encoder runs.

        Where most slots are taken they come free one by one, and a run for each would hold up all rows each time.
        """
        self._note_filled(self.runs.take_done())
        key = self._key(request)
        if self._keys and not self.pool.is_filled(key):
            if self.max_ahead:
                self._expected.setdefault(key, request.model_inputs)
                return {"encoder": "it is to run for this request, beside the rows that run"}
            if self._pause and len(self._keys) >= self._many_rows:
                return {"encoder": "it is to run for several requests at once"}
        shortage = self.pool.reserve(key)
        return {} if shortage is None else {"encoder entries": shortage}

    @hookimpl
    def expect_requests(self, requests: Sequence[RequestInputs]) -> None:
        """Remember for whom the encoder may run ahead."""
        self._expected = {self._key(request): request.model_inputs for request in requests}

    @hookimpl
    def add_request(self, slot: int, request: RequestView) -> None:
        """Hold the request's entry; a new one is filled by the next `run_encoder`."""
        key = self._key(request)
        entry, is_new = self.pool.take(key)
        self._keys[slot] = key
        self._expected.pop(key, None)
        self._is_joining |= not self.pool.is_filled(key)
        if is_new:
            self._fills.append(Fill(key, entry, request.model_inputs))
        self._table.stage(0, slot, entry)
        self._table.stage(1, slot, self.encoder.num_positions(request.model_inputs))

    @hookimpl
    def remove_request(self, slot: int, reason: RemoveReason) -> None:
        """Let go of the slot's entry; launched steps read it before anything later overwrites it."""
        self._note_filled(self.runs.take_done())
        self.pool.release(self._keys.pop(slot))
        self._fills = [fill for fill in self._fills if self.pool.is_held(fill.key)]

    @hookimpl
    def apply_staged_writes(self) -> None:
        """Send new rows of the table; what was set aside for this step has been taken by now."""
        self.pool.drop_reservations()
        self._table.apply()

    @hookimpl
    def run_encoder(self, batch: InputBatch) -> None:
        """Fill the entries that were taken anew; with none, those of requests that wait."""
        self._note_filled(self.runs.take_done())
        fills, self._fills = self._fills, []
        if fills:
            self._pause = _PAUSE * max(self._batch_size - len(fills), 0) // self._batch_size
        elif self._pause:
            self._pause -= 1
        for first in range(0, len(fills), self._batch_size):
            self.runs.launch(fills[first : first + self._batch_size])
        if self._is_joining:
            self._note_filled(self.runs.join())
            self._is_joining = False
        elif self._expected and self.runs.num_running < self.max_ahead:
            self._run_ahead()

    @hookimpl
    def prepare_attn(self, batch: InputBatch) -> None:
        """Where the layers find this step's rows."""
        starts, longest = batch.query_start_loc, batch.max_query_len
        rows = CrossRows(batch.idx_mapping, starts, self._entries, self._lengths, longest)
        self.kept.prepare(rows, len(batch.input_ids))

    def _run_ahead(self) -> None:
        fills: list[Fill] = []
        for place, (key, model_inputs) in enumerate(self._expected.items()):
            # Who is next may displace what others wait for; the others would only take from each other.
            entry = self.pool.take_ahead(key, self._expected if place else ())
            if entry is not None:
                fills.append(Fill(key, entry, model_inputs))
            if len(fills) == self._batch_size:
                break
        if not fills:
            return
        self._ahead |= {fill.key for fill in fills}
        try:
            self.runs.launch(fills)
        except BaseException:
            self._let_go(fills)
            raise

    def _note_filled(self, fills: Sequence[Fill]) -> None:
        for fill in fills:
            self.pool.set_filled(fill.key, fill.entry)
        self._let_go(fills)

    def _let_go(self, fills: Sequence[Fill]) -> None:
        """Of entries that were held while the encoder ran ahead for them, lest they be given away."""
        for fill in fills:
            if fill.key in self._ahead:
                self._ahead.remove(fill.key)
                self.pool.release(fill.key)

    def _key(self, request: RequestInputs) -> bytes:
        return request.input_keys.get(KEY_NAME) or self.encoder.content_key(request.model_inputs)


def _option(config: ModelConfig, name: str, least: int = 1) -> int | None:
    value = config.options.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CapabilityError(f"model_options: {name}={value!r} must be an integer of at least {least}")
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
