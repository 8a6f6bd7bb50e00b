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
    """Started before the post-update, so that the copy runs beside it; `get_output` waits for this step alone."""

    def __init__(
        self,
        batch: InputBatch,
        sampled: SamplerOutput,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        max_sampled: int,
        copy_stream: torch.cuda.Stream | None,
        scored: ScoredTokens | None = None,
    ) -> None:
        """num_sampled, num_rejected: int32 [num_reqs_padded]; max_sampled: columns of the result, K + 1."""
        self._scored = scored
        self._num_reqs, self._max_sampled = batch.num_reqs, max_sampled
        self._cu_num_logits = batch.cu_num_logits_np
        tensors = {
            "num_sampled": num_sampled[: batch.num_reqs],
            "num_rejected": num_rejected[: batch.num_reqs],
            "token_ids": sampled.token_ids,
            "failed": sampled.failed,
            "logprob_token_ids": sampled.logprob_token_ids,
            "logprob_values": sampled.logprob_values,
            "sampled_ranks": sampled.sampled_ranks,
        }
        if scored is not None:
            tensors |= scored.tensors()
        device = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            # The sources may be buffers that the next step overwrites, and on a CPU `to` makes no copy.
            self._host = {name: tensor.clone() for name, tensor in device.items()}
            return
        copy_stream.wait_stream(torch.cuda.current_stream(copy_stream.device))
        with torch.cuda.stream(copy_stream):
            self._host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in device.items()}
            self._event = torch.cuda.Event()
            self._event.record(copy_stream)
        for tensor in device.values():
            tensor.record_stream(copy_stream)  # its memory is not handed out again before the copy is done

    def get_output(self) -> ModelRunnerOutput:
        """Wait for this step's tokens and lay them out by batch row."""
        if self._event is not None:
            self._event.synchronize()
        host = {name: tensor.numpy() for name, tensor in self._host.items()}
        rows = np.repeat(np.arange(self._num_reqs), np.diff(self._cu_num_logits))
        columns = np.arange(len(rows)) - self._cu_num_logits[rows]
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
            num_sampled=host["num_sampled"],
            num_rejected=host["num_rejected"],
            failed=failed,
            logprobs=logprobs,
            prompt_logprobs={} if self._scored is None else self._scored.by_row(host),
        )

    def _by_row(self, flat: npt.NDArray[Any], rows: _Index, columns: _Index) -> npt.NDArray[Any]:
        """[num_logits, ...] to [num_reqs, K + 1, ...]; cells that were not sampled are 0."""
        out = np.zeros((self._num_reqs, self._max_sampled, *flat.shape[1:]), flat.dtype)
        out[rows, columns] = flat
        return out
