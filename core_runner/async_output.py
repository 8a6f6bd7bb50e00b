"""`AsyncOutput`: a step's sampled tokens on their way to the host, on a stream of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from core_runner.scheduling.output import IntArray, Logprobs, ModelRunnerOutput
from model_states import InputBatch, SamplerOutput


@dataclass(slots=True)
class _Fields:
    """The tensors of one step that the host wants, on one side or the other."""

    token_ids: torch.Tensor  # [num_logits]
    failed: torch.Tensor  # [num_logits]
    num_sampled: torch.Tensor  # [num_reqs]
    num_rejected: torch.Tensor  # [num_reqs]
    logprob_token_ids: torch.Tensor | None
    logprob_values: torch.Tensor | None
    sampled_ranks: torch.Tensor | None

    def to_host(self) -> _Fields:
        """Copies in pinned memory; on a GPU they are complete only once the stream has run."""
        values = (getattr(self, name) for name in self.__slots__)
        return _Fields(*(v if v is None else v.to("cpu", non_blocking=True) for v in values))


class AsyncOutput:
    """Started before the post-update, so that the copy runs beside it; `get_output` waits for this step alone."""

    def __init__(
        self,
        batch: InputBatch,
        sampled: SamplerOutput,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        max_sampled: int,
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        """num_sampled, num_rejected: int32 [num_reqs_padded]; max_sampled: columns of the result, K + 1."""
        n = batch.num_reqs
        self._num_reqs, self._max_sampled = n, max_sampled
        self._cu_num_logits = batch.cu_num_logits_np.copy()  # the batch's own array lives one step
        # Held until the copy is done, so that the allocator does not hand their memory to a later step.
        self._device = _Fields(
            sampled.token_ids,
            sampled.failed,
            num_sampled[:n],
            num_rejected[:n],
            sampled.logprob_token_ids,
            sampled.logprob_values,
            sampled.sampled_ranks,
        )
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            # The sources are buffers that later steps overwrite, and on a CPU `to` is no copy.
            self._host = _Fields(*(v if v is None else v.clone() for v in _values(self._device)))
            return
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            self._host = self._device.to_host()
            self._event = torch.cuda.Event()
            self._event.record(copy_stream)
        for value in _values(self._device):
            if value is not None:
                value.record_stream(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for this step's tokens and lay them out by batch row."""
        if self._event is not None:
            self._event.synchronize()
        host = self._host
        counts = np.diff(self._cu_num_logits)
        rows = np.repeat(np.arange(self._num_reqs), counts)
        columns = np.arange(len(rows)) - self._cu_num_logits[rows]
        failed = np.zeros(self._num_reqs, np.bool_)
        np.logical_or.at(failed, rows, host.failed.numpy())
        return ModelRunnerOutput(
            sampled_token_ids=self._by_row(host.token_ids, rows, columns, np.int32),
            num_sampled=host.num_sampled.numpy(),
            num_rejected=host.num_rejected.numpy(),
            failed=failed,
            logprobs=self._logprobs(rows, columns),
        )

    def _logprobs(self, rows: IntArray, columns: IntArray) -> Logprobs | None:
        host = self._host
        if host.logprob_token_ids is None or host.logprob_values is None or host.sampled_ranks is None:
            return None
        return Logprobs(
            token_ids=self._by_row(host.logprob_token_ids, rows, columns, np.int32),
            values=self._by_row(host.logprob_values, rows, columns, np.float32),
            ranks=self._by_row(host.sampled_ranks, rows, columns, np.int32),
        )

    def _by_row(self, flat: torch.Tensor, rows: IntArray, columns: IntArray, dtype: type) -> npt.NDArray:
        """[num_logits, ...] to [num_reqs, K + 1, ...]; cells that were not sampled are 0."""
        out = np.zeros((self._num_reqs, self._max_sampled, *flat.shape[1:]), dtype)
        out[rows, columns] = flat.numpy()
        return out


def _values(fields: _Fields) -> list[torch.Tensor | None]:
    return [getattr(fields, name) for name in _Fields.__slots__]
