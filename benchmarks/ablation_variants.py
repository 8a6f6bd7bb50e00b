"""The engine without one of its ideas, or without several: each variant is options of `LLM`, and patches.

The patches replace whole classes or methods while a variant runs. The product has no switch for what nobody would
want; what somebody may want (no graphs, no asynchronous scheduling) is an option of `RunnerConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import core_runner.runner as runner_module
from core_runner import RunnerConfig
from core_runner.async_output import AsyncOutput
from core_runner.graphs import StepGraphs, StepShape
from core_runner.input_batch import InputPreparer
from core_runner.runner import ModelRunner
from core_runner.scheduling.output import IntArray, SchedulerOutput
from core_runner.step_launcher import StepLauncher
from model_states import InputBatch


class BlockingOutput(AsyncOutput):
    """Copies the sampled tokens on the stream of the model, and waits for them, before anything else is launched."""

    def __init__(self, *args: Any) -> None:
        """The fourth argument has the copy stream."""
        batch, sampled, max_sampled, buffers, *scored = args
        if buffers is not None:
            buffers.stream = torch.cuda.current_stream(buffers.stream.device)
        super().__init__(batch, sampled, max_sampled, buffers, *scored)
        self.wait()


class HostInputPreparer(InputPreparer):
    """Keeps tokens and block tables in numpy, rebuilds every input of a step there, and copies all of it.

    So each step needs the tokens of the step before on the host, and waits for them. `remember` has the last output.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        states, tables = self._states, self._block_tables
        self._tokens = np.zeros((states.max_num_reqs + 1, states.max_model_len), np.int64)
        self._num_known = np.zeros(states.max_num_reqs + 1, np.int64)
        self._tables = [
            np.zeros((states.max_num_reqs + 1, columns), np.int32) for columns in tables.max_blocks
        ]
        self._slots: IntArray = np.zeros(0, np.int32)
        self._unread: AsyncOutput | None = None

    def remember(self, output: AsyncOutput | None) -> None:
        """What the step that was just launched will have sampled."""
        self._unread = output

    def begin(self, scheduler_output: SchedulerOutput, *sizes: int | None) -> InputBatch:
        """Wait for the last step's tokens, then build and send everything."""
        so = scheduler_output
        self._take_sampled()
        for new in so.new_requests:
            self._tokens[new.slot, : new.prefill_len] = new.prefill_token_ids
            self._num_known[new.slot] = new.prefill_len
        for table, update in zip(self._tables, so.block_updates, strict=True):
            ends = np.cumsum(update.lengths)
            for slot, start, length, end in zip(
                update.slots, update.starts, update.lengths, ends, strict=True
            ):
                table[slot, start : start + length] = update.block_ids[end - length : end]
        batch = super().begin(so, *sizes)
        self._send_inputs(so, batch)
        self._send_logits_rows(so, batch)
        self._slots = so.slots
        return batch

    def fill(self, batch: InputBatch) -> None:
        """Nothing is left for the device to make."""

    def _take_sampled(self) -> None:
        if self._unread is None:
            return
        output, self._unread = self._unread.get_output(), None
        slots = self._slots[output.num_sampled > 0]
        self._tokens[slots, self._num_known[slots]] = output.sampled_token_ids[output.num_sampled > 0, 0]
        self._num_known[slots] += 1

    def _send_inputs(self, so: SchedulerOutput, batch: InputBatch) -> None:
        """Ids, positions, lengths, block tables and slot mappings, padded as the batch is."""
        counts, num_rows = so.num_scheduled_tokens, len(batch.idx_mapping)
        rows = np.repeat(np.arange(so.num_reqs), counts)
        slots = so.slots[rows]
        positions = so.num_computed_tokens[rows] + np.arange(len(rows)) - batch.query_start_loc_np[rows]
        self._send(self._tokens[slots, positions], batch.input_ids)
        self._send(positions.astype(np.int64), batch.positions)
        self._send(so.num_computed_tokens + counts, batch.seq_lens)
        rows_of_tables = np.full(num_rows, self._states.null_slot)
        rows_of_tables[: so.num_reqs] = so.slots
        groups = zip(self._tables, self._block_tables.block_sizes, strict=True)
        for group, (table, block_size) in enumerate(groups):
            self._send(table[rows_of_tables], self.buffers.block_tables[group][:num_rows].view(-1))
            places = table[slots, positions // block_size].astype(np.int64) * block_size
            self._send(places + positions % block_size, batch.slot_mappings[group], padding=-1)

    def _send_logits_rows(self, so: SchedulerOutput, batch: InputBatch) -> None:
        sampling = np.flatnonzero(np.diff(batch.cu_num_logits_np))
        self._send(batch.query_start_loc_np[sampling + 1].astype(np.int64) - 1, batch.logits_indices)
        self._send(so.slots[sampling], batch.expanded_idx_mapping, padding=self._states.null_slot)
        self._send(np.zeros(len(sampling), np.int32), batch.expanded_local_pos)

    def _send(self, values: np.ndarray, out: torch.Tensor, padding: int = 0) -> None:
        whole = np.full(out.numel(), padding, values.dtype)
        whole[: values.size] = values.reshape(-1)
        self._transfer.copy(whole, out)


def _sample_and_remember(sample_tokens: Any) -> Any:
    def call(runner: ModelRunner) -> AsyncOutput | None:
        output: AsyncOutput | None = sample_tokens(runner)
        runner.inputs.remember(output)  # type: ignore[attr-defined]
        return output

    return call


def _decode_shape_only(shape: Any) -> Any:
    def call(graphs: StepGraphs, step: SchedulerOutput) -> StepShape | None:
        return shape(graphs, step) if step.total_num_tokens == step.num_reqs else None

    return call


@contextmanager
def host_inputs() -> Iterator[None]:
    """Input preparation on the host, from tokens that it has to wait for."""
    sample = _sample_and_remember(ModelRunner.sample_tokens)
    with (
        patch.object(runner_module, "InputPreparer", HostInputPreparer),
        patch.object(ModelRunner, "sample_tokens", sample),
    ):
        yield


@contextmanager
def blocking_copy() -> Iterator[None]:
    """Outputs copied on the model's stream, and waited for."""
    with patch.object(runner_module, "AsyncOutput", BlockingOutput):
        yield


@contextmanager
def forward_graphs() -> Iterator[None]:
    """Graphs of the model's part alone: preparation, sampling and post-update are launched one by one."""
    with patch.object(StepLauncher, "_variant", lambda launcher, batch: None):
        yield


@contextmanager
def decode_graphs() -> Iterator[None]:
    """Graphs for steps without prefill alone."""
    with patch.object(StepGraphs, "shape", _decode_shape_only(StepGraphs.shape)):
        yield


@dataclass(frozen=True)
class Variant:
    """Options of `LLM`, and patches that last as long as it does."""

    options: Mapping[str, Any]
    patches: Sequence[Any] = ()

    @property
    def is_supported(self) -> bool:
        """Whether this version has the options."""
        return set(self.options) <= {field.name for field in fields(RunnerConfig)}

    @property
    def has_graphs(self) -> bool:
        """Whether anything is recorded."""
        return self.options.get("cuda_graphs") is not False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hold the patches."""
        with ExitStack() as stack:
            for one in self.patches:
                stack.enter_context(one())
            yield


VARIANTS = {
    "everything": Variant({}),
    "no asynchronous scheduling": Variant({"async_scheduling": False}),
    "blocking output copy": Variant({}, [blocking_copy]),
    "inputs built on the host": Variant({}, [host_inputs]),
    "graphs of the forward alone": Variant({}, [forward_graphs]),
    "graphs of decode steps alone": Variant({}, [decode_graphs]),
    "layers not fused": Variant({"fused_layers": False}),
    # What a runner does that builds inputs on the host and records the forward of decode steps.
    "host inputs, blocking copy, decode-forward graphs": Variant(
        {"async_scheduling": False}, [host_inputs, blocking_copy, forward_graphs, decode_graphs]
    ),
    "no graphs": Variant({"cuda_graphs": False}),
    "no graphs, layers not fused": Variant({"cuda_graphs": False, "fused_layers": False}),
    "no graphs, host inputs, blocking copy": Variant(
        {"cuda_graphs": False, "async_scheduling": False}, [host_inputs, blocking_copy]
    ),
}
