"""`StepMasks`: a step's `GrammarBitmask` on its way from the scheduler to the rows of logits."""

from __future__ import annotations

import numpy as np
import torch

from core_runner.errors import SchedulerOutputError
from core_runner.request_states import RequestStates
from core_runner.scheduling.output import GrammarBitmask, IntArray, SchedulerOutput
from model_states.batch import GrammarMask, InputBatch
from model_states.staged import HostToDevice


class StepMasks:
    """Checks masks, and copies them without waiting for the device; nothing is allocated before the first one.

    request_states: the slots. max_num_rows: rows of logits of the largest step. vocab_size: ids of a row.
    """

    def __init__(
        self, request_states: RequestStates, max_num_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self._states = request_states
        self._max_num_rows, self._num_words, self._device = max_num_rows, -(-vocab_size // 32), device
        self._transfer = HostToDevice(device)
        self._buffer: torch.Tensor | None = None

    def validate(self, step: SchedulerOutput) -> None:
        """Raise `SchedulerOutputError` for masks that fit no sample of the step, which is valid otherwise."""
        bitmask = step.grammar_bitmask
        if bitmask is None:
            return
        prefill_len = self._states.check_changes(step.removed, step.new_requests)
        shapes = [np.shape(bitmask.slots), np.shape(bitmask.positions)]
        if shapes[0] != shapes[1] or len(shapes[0]) != 1:
            raise SchedulerOutputError(
                f"grammar_bitmask: slots and positions have shapes {shapes}; each must be [n]"
            )
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        samples = np.zeros(len(prefill_len), np.int32)
        drafts = 0 if step.num_draft_tokens is None else step.num_draft_tokens
        samples[step.slots] = np.where(ends >= prefill_len[step.slots], 1 + drafts, 0)
        inside = (bitmask.slots >= 0) & (bitmask.slots < len(samples)) & (bitmask.positions >= 0)
        inside &= bitmask.positions < samples[np.where(inside, bitmask.slots, 0)]
        if not inside.all():
            row = int((~inside).argmax())
            raise SchedulerOutputError(
                f"grammar_bitmask: slot {bitmask.slots[row]} draws no sample {bitmask.positions[row]} in this step"
            )
        pairs = np.stack([bitmask.slots, bitmask.positions], axis=1)
        if len(np.unique(pairs, axis=0)) < len(pairs):
            raise SchedulerOutputError("grammar_bitmask has two masks for one sample; combine them")
        if not callable(bitmask.words):
            self._check_words(bitmask, bitmask.words)

    def to_device(self, bitmask: GrammarBitmask, batch: InputBatch) -> GrammarMask:
        """The masks at the rows of logits that they are for. A function that gives them is called here."""
        words = bitmask.words() if callable(bitmask.words) else bitmask.words
        self._check_words(bitmask, words)
        row_of_slot = np.zeros(int(batch.idx_mapping_np.max()) + 1, np.int64)
        row_of_slot[batch.idx_mapping_np] = np.arange(batch.num_reqs)
        rows = batch.cu_num_logits_np[row_of_slot[bitmask.slots]] + bitmask.positions
        num_rows, start = len(rows), _aligned(len(rows))
        packed = np.zeros(start + words.size, np.int32)
        packed[:num_rows], packed[start:] = rows, words.reshape(-1)
        buffer = self._device_buffer()
        self._transfer.copy(packed, buffer)
        return GrammarMask(buffer[:num_rows], buffer[start : packed.size].view(num_rows, self._num_words))

    def _check_words(self, bitmask: GrammarBitmask, words: IntArray) -> None:
        want = (len(bitmask.slots), self._num_words)
        if np.shape(words) != want or words.dtype != np.int32:
            raise SchedulerOutputError(
                f"grammar_bitmask.words is {words.dtype} of shape {list(np.shape(words))}; it must be int32 of "
                f"shape {list(want)}"
            )

    def _device_buffer(self) -> torch.Tensor:
        if self._buffer is None:
            size = _aligned(self._max_num_rows) + self._max_num_rows * self._num_words
            self._buffer = torch.empty(size, dtype=torch.int32, device=self._device)
        return self._buffer


def _aligned(num_rows: int) -> int:
    """Words begin at a multiple of 16 bytes: for any other address Triton compiles a kernel anew."""
    return -(-num_rows // 4) * 4
