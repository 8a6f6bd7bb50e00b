"""`AsyncOutput`: a step's sampled tokens on their way to the host, on a stream of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core_runner.prompt_logprobs import ScoredTokens
from core_runner.scheduling.output import Logprobs, ModelRunnerOutput
from model_states import InputBatch, SamplerOutput

_Index = npt.NDArray[np.integer[Any]]


class AsyncOutput:
    """Tokens of one step; `get_output` waits for this step alone.

    The device tensors are kept until then, so that their memory is not handed out before the copy is done; who
    overwrites them in place (a graph's replay) calls `release` first.
    """

    def __init__(
        self,
        batch: InputBatch,
        sampled: SamplerOutput,
        max_sampled: int,
        copy_stream: torch.cuda.Stream | None,
        scored: ScoredTokens | None = None,
    ) -> None:
        """max_sampled: columns of the result, K + 1. Rows of `sampled` past the batch's logits are padding."""
        self._scored = scored
        self._num_reqs, self._max_sampled = batch.num_reqs, max_sampled
        self._cu_num_logits = batch.cu_num_logits_np
        num_logits = batch.num_logits
        self._once_each = max_sampled == 1 and num_logits == batch.num_reqs
        tensors = {
            "token_ids": sampled.token_ids[:num_logits],
            "failed": sampled.failed[:num_logits],
            "logprob_token_ids": sampled.logprob_token_ids,
            "logprob_values": sampled.logprob_values,
            "sampled_ranks": sampled.sampled_ranks,
        }
        if scored is not None:
            tensors |= scored.tensors()
        self._device = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.copied: torch.cuda.Event | None = None
        if copy_stream is None:
            # The sources may be buffers that the next step overwrites, and on a CPU `to` makes no copy.
            self._host = {name: tensor.clone() for name, tensor in self._device.items()}
            return
        copy_stream.wait_stream(torch.cuda.current_stream(copy_stream.device))
        with torch.cuda.stream(copy_stream):
            self._host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in self._device.items()}
            self.copied = torch.cuda.Event()
            self.copied.record(copy_stream)

    def release(self) -> None:
        """Have the current stream wait until the copy is done, which it nearly always is."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for this step's tokens and lay them out by batch row."""
        if self.copied is not None:
            self.copied.synchronize()
        self._device.clear()
        host = {name: tensor.numpy() for name, tensor in self._host.items()}
        num_logits = np.diff(self._cu_num_logits)
        rows = np.repeat(np.arange(self._num_reqs), num_logits)
        columns = np.arange(len(rows)) - self._cu_num_logits[rows]
        failed = host["failed"]
        if not self._once_each:
            failed = np.zeros(self._num_reqs, np.bool_)
            np.logical_or.at(failed, rows, host["failed"])
        logprobs = None
        if "logprob_values" in host:
            logprobs = Logprobs(
                token_ids=self._by_row(host["logprob_token_ids"], rows, columns),
                values=self._by_row(host["logprob_values"], rows, columns),
                ranks=self._by_row(host["sampled_ranks"], rows, columns),
            )
        return ModelRunnerOutput(
            sampled_token_ids=self._by_row(host["token_ids"].astype(np.int32), rows, columns),
            num_sampled=num_logits,
            num_rejected=np.zeros(self._num_reqs, np.int32),  # nothing that is drafted is verified yet
            failed=failed,
            logprobs=logprobs,
            prompt_logprobs={} if self._scored is None else self._scored.by_row(host),
        )

    def _by_row(self, flat: npt.NDArray[Any], rows: _Index, columns: _Index) -> npt.NDArray[Any]:
        """[num_logits, ...] to [num_reqs, K + 1, ...]; cells that were not sampled are 0."""
        if self._once_each:
            return flat[:, None]
        out = np.zeros((self._num_reqs, self._max_sampled, *flat.shape[1:]), flat.dtype)
        out[rows, columns] = flat
        return out
