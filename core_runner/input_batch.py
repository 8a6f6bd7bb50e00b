"""From a `SchedulerOutput` to an `InputBatch` on the device, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch

from core_runner.block_tables import BlockTables
from core_runner.errors import SchedulerOutputError
from core_runner.input_buffers import InputBuffers
from core_runner.kernels.expand_idx_mapping import expand_idx_mapping
from core_runner.kernels.gather_block_tables import gather_block_tables
from core_runner.kernels.merge_tokens import merge_tokens
from core_runner.kernels.positions import compute_positions
from core_runner.kernels.post_update import post_update
from core_runner.kernels.prefill_tokens import prefill_tokens
from core_runner.kernels.slot_mapping import compute_slot_mapping
from core_runner.request_states import RequestStates
from core_runner.scheduling.output import IntArray, SchedulerOutput
from model_states.batch import InputBatch
from model_states.staged import HostToDevice
from model_states.staged_writer import StagedWriter


class InputPreparer:
    """Builds each step's `InputBatch` from the slots' arrays, and carries what was sampled back into them.

    Batches are views of one set of buffers: the next `prepare` overwrites them in stream order. The host
    decides only what it can know (who runs, how many tokens, who samples); ids, positions and lengths come
    from the device.
    """

    def __init__(
        self,
        request_states: RequestStates,
        block_tables: BlockTables,
        max_num_batched_tokens: int,
        device: torch.device,
        writer: StagedWriter | None = None,
    ) -> None:
        """writer: of the tensors that a step reads, flushed when the step begins."""
        self._writer = StagedWriter(device) if writer is None else writer
        self._states = request_states
        self._block_tables = block_tables
        self.max_num_tokens = max_num_batched_tokens
        self.max_num_reqs = request_states.max_num_reqs
        self._max_num_logits = request_states.num_draft_tokens + 1
        self._transfer = HostToDevice(device)
        self._packed: IntArray = np.zeros(0, dtype=np.int32)  # what `buffers.packed` holds
        self.buffers = InputBuffers(
            self.max_num_tokens,
            self.max_num_reqs,
            self.max_num_reqs * self._max_num_logits,
            block_tables.max_blocks,
            device,
            self._writer,
        )

    @property
    def num_groups(self) -> int:
        """Cache groups."""
        return self._block_tables.num_groups

    def validate(self, scheduler_output: SchedulerOutput) -> None:
        """Raise `SchedulerOutputError` for a step that breaks a rule; changes nothing, so a caller may go on.

        Steps of our own scheduler are right by construction: tests and poison mode alone check them.
        Call it before the removals, admissions and block updates of the step are applied.
        """
        so = scheduler_output
        if so.is_trusted and not self._states.poison:
            return
        prefill_len = self._states.check_changes(so.removed, so.new_requests)
        filled = self._block_tables.check_changes([r.slot for r in so.removed], so.block_updates)
        drafts = _num_draft_tokens(so)
        _check_shapes(so, drafts)
        if so.is_repeat and not so.is_trusted:
            raise SchedulerOutputError(
                "is_repeat is for steps of core_runner's own Scheduler; leave it False"
            )
        if so.num_reqs:
            self._check_slots(so, prefill_len)
            self._check_counts(so, drafts)
            self._check_progress(so, prefill_len[so.slots], drafts)
            self._check_blocks(so, filled)

    def _check_slots(self, so: SchedulerOutput, prefill_len: IntArray) -> None:
        slots = np.asarray(so.slots)
        if slots.min() < 0 or slots.max() >= self.max_num_reqs:
            raise SchedulerOutputError(
                f"slots {slots.min()} to {slots.max()} reach outside [0, max_num_reqs={self.max_num_reqs})"
            )
        uses = np.bincount(slots, minlength=self.max_num_reqs)
        if uses.max() > 1:
            raise SchedulerOutputError(
                f"slot {int(uses.argmax())} is scheduled {uses.max()} times; once is allowed"
            )
        _refuse(prefill_len[slots] == 0, slots, "is scheduled but holds no request; admit it first")

    def _check_counts(self, so: SchedulerOutput, drafts: IntArray) -> None:
        slots, scheduled, computed = so.slots, so.num_scheduled_tokens, so.num_computed_tokens
        _refuse(scheduled < 1, slots, "is scheduled without tokens; leave it out", scheduled)
        if so.total_num_tokens > self.max_num_tokens:
            raise SchedulerOutputError(
                f"{so.total_num_tokens} tokens are scheduled, more than "
                f"max_num_batched_tokens={self.max_num_tokens}"
            )
        limit = self._states.max_model_len
        _refuse(
            (computed < 0) | (computed >= limit), slots, f"has tokens computed outside [0, {limit})", computed
        )
        end = computed + scheduled
        _refuse(end > limit, slots, f"would grow past max_model_len={limit}", end)
        most = self._max_num_logits - 1
        _refuse((drafts < 0) | (drafts > most), slots, f"has drafts outside [0, K={most}]", drafts)

    def _check_progress(self, so: SchedulerOutput, prefill_len: IntArray, drafts: IntArray) -> None:
        slots, scheduled, computed = so.slots, so.num_scheduled_tokens, so.num_computed_tokens
        admitted = np.full(self.max_num_reqs, -1, dtype=np.int32)
        for new in so.new_requests:
            admitted[new.slot] = new.num_computed_tokens
        wrong = (admitted[slots] >= 0) & (admitted[slots] != computed)
        _refuse(wrong, slots, "has another num_computed_tokens than its admission says", computed)
        in_prefill, end = computed < prefill_len, computed + scheduled
        _refuse(in_prefill & (end > prefill_len), slots, "has a chunk that reaches past its prefill", end)
        _refuse(in_prefill & (drafts > 0), slots, "has drafts while its prefill is not finished", drafts)
        wrong = ~in_prefill & (scheduled != drafts + 1)
        _refuse(wrong, slots, "decodes, so it needs 1 + its drafts scheduled tokens", scheduled)

    def _check_blocks(self, so: SchedulerOutput, filled: IntArray) -> None:
        end = so.num_computed_tokens + so.num_scheduled_tokens
        for group, block_size in enumerate(self._block_tables.block_sizes):
            short = end > filled[group][so.slots] * block_size
            _refuse(short, so.slots, f"has too few blocks in cache group {group} for its tokens", end)

    def prepare(
        self,
        scheduler_output: SchedulerOutput,
        num_tokens_padded: int | None = None,
        num_reqs_padded: int | None = None,
    ) -> InputBatch:
        """The step's batch, padded to the given sizes (default: its real ones; at least one row).

        The step is a valid one (`validate`), and its staged writes have been applied.
        """
        batch = self.begin(scheduler_output, num_tokens_padded, num_reqs_padded)
        self.fill(batch)
        return batch

    def begin(
        self,
        scheduler_output: SchedulerOutput,
        num_tokens_padded: int | None = None,
        num_reqs_padded: int | None = None,
    ) -> InputBatch:
        """The first half of `prepare`: what the host knows is on its way, and `fill` makes the rest of it."""
        so = scheduler_output
        num_rows = max(so.num_reqs, 1) if num_reqs_padded is None else num_reqs_padded
        num_tokens = so.total_num_tokens if num_tokens_padded is None else num_tokens_padded
        assert max(so.num_reqs, 1) <= num_rows <= self.max_num_reqs
        assert so.total_num_tokens <= num_tokens <= self.max_num_tokens
        # A steady decode step has the rows of the one before it: the device has them already.
        if not so.is_repeat or self._states.poison:
            packed = self._pack(so)
            if not np.array_equal(packed, self._packed):
                assert not so.is_repeat, "a step that is no repetition says it is"
                self._send_rows(packed)
        self._writer.flush()
        return self._batch(so, num_tokens, num_rows, self._packed)

    def _send_rows(self, packed: IntArray) -> None:
        """Bring the rows of the step to the device, on the way of those who have to get there anyway."""
        if self._writer.is_empty:
            self._transfer.copy(packed, self.buffers.packed)
        else:
            self.buffers.staged.stage(0, 0, packed)
            self.buffers.staged.apply()
        self._packed = packed

    def _pack(self, so: SchedulerOutput) -> IntArray:
        """The rows of the step, padded to R, as `InputBuffers.packed` holds them."""
        num_reqs, max_num_reqs = so.num_reqs, self.max_num_reqs
        ends = so.num_computed_tokens + so.num_scheduled_tokens
        samples = ends >= self._states.prefill_len_np[so.slots]
        packed = np.empty(3 * max_num_reqs + 2, dtype=np.int32)
        packed[:num_reqs] = so.slots
        packed[num_reqs:max_num_reqs] = self._states.null_slot
        query_start_loc, cu_num_logits = packed[max_num_reqs:].reshape(2, max_num_reqs + 1)
        _prefix_sum(so.num_scheduled_tokens, query_start_loc)
        _prefix_sum(np.where(samples, _num_draft_tokens(so) + 1, 0), cu_num_logits)
        return packed

    def _batch(self, so: SchedulerOutput, num_tokens: int, num_rows: int, packed: IntArray) -> InputBatch:
        num_reqs = so.num_reqs
        query_start_loc_np, cu_num_logits_np = packed[self.max_num_reqs :].reshape(2, -1)[:, : num_reqs + 1]
        seq_lens = so.num_computed_tokens + so.num_scheduled_tokens
        # Padding rows have no logits, so as many rows of logits as rows are enough for any step of this size.
        num_logits = num_rows * self._max_num_logits
        return InputBatch(
            num_reqs=num_reqs,
            num_tokens=int(query_start_loc_np[-1]),
            idx_mapping_np=packed[:num_reqs],
            num_scheduled_tokens_np=so.num_scheduled_tokens,
            num_computed_tokens_np=so.num_computed_tokens,
            query_start_loc_np=query_start_loc_np,
            cu_num_logits_np=cu_num_logits_np,
            max_query_len=int(so.num_scheduled_tokens.max(initial=0)),
            max_seq_len=int(seq_lens.max(initial=0)),
            slot_tables=self._block_tables.tensors,
            **self.buffers.views(num_tokens, num_rows, num_logits),
        )

    def fill(self, batch: InputBatch) -> None:
        """Run the preparation kernels over the batch's buffers. A graph may hold them."""
        states, buffers = self._states, self.buffers
        rows, starts, computed = batch.idx_mapping, batch.query_start_loc, states.num_computed_tokens
        compute_positions(rows, starts, computed, batch.positions, batch.seq_lens)
        prefill_tokens(rows, starts, computed, states.prefill_len, states.all_token_ids, batch.input_ids)
        merge_tokens(
            rows,
            starts,
            batch.cu_num_logits,
            computed,
            states.prefill_len,
            states.last_sampled_tokens,
            states.draft_tokens,
            batch.input_ids,
        )
        expand_idx_mapping(
            rows,
            starts,
            batch.cu_num_logits,
            buffers.expanded_idx_mapping,
            buffers.expanded_local_pos,
            buffers.logits_indices,
            states.null_slot,
        )
        groups = zip(self._block_tables.tensors, self._block_tables.block_sizes, strict=True)
        for group, (table, block_size) in enumerate(groups):
            gather_block_tables(table, rows, batch.block_tables[group])
            compute_slot_mapping(
                batch.block_tables[group], starts, batch.positions, block_size, batch.slot_mappings[group]
            )

    def post_update(
        self,
        batch: InputBatch,
        token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> None:
        """Carry the step's outcome into the slots: token_ids [num_logits], num_sampled and num_rejected int32
        [num_reqs] (or longer; padding rows change nothing).
        """
        states = self._states
        post_update(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.cu_num_logits,
            token_ids,
            num_sampled,
            num_rejected,
            states.all_token_ids,
            states.total_len,
            states.last_sampled_tokens,
            states.num_computed_tokens,
            self._max_num_logits,
        )


def _num_draft_tokens(so: SchedulerOutput) -> IntArray:
    return np.zeros(so.num_reqs, dtype=np.int32) if so.num_draft_tokens is None else so.num_draft_tokens


def _prefix_sum(counts: IntArray, out: IntArray) -> None:
    """Exclusive prefix sum of `counts`, its total repeated to the end of `out`."""
    out[0] = 0
    np.cumsum(counts, out=out[1 : len(counts) + 1])
    out[len(counts) + 1 :] = out[len(counts)]


def _check_shapes(so: SchedulerOutput, drafts: IntArray) -> None:
    shapes = [np.shape(a) for a in (so.slots, so.num_scheduled_tokens, so.num_computed_tokens, drafts)]
    if set(shapes) != {(so.num_reqs,)}:
        raise SchedulerOutputError(
            f"slots, num_scheduled_tokens, num_computed_tokens and num_draft_tokens have shapes {shapes}; "
            f"each must be [num_reqs]"
        )


def _refuse(wrong: np.ndarray, slots: IntArray, what: str, values: IntArray | None = None) -> None:
    """Raise for the first row that is wrong."""
    if wrong.any():
        row = int(wrong.argmax())
        value = "" if values is None else f" ({values[row]})"
        raise SchedulerOutputError(f"slot {slots[row]} {what}{value}")
