"""`AsyncOutput`: a step's sampled tokens on their way to the host, on a stream of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core_runner.prompt_logprobs import ScoredTokens
from core_runner.scheduling.output import Logprobs, ModelRunnerOutput
from model_states import InputBatch, SamplerOutput


class OutputBuffer:
    """Pinned memory for the sampled ids of one step, and the events around their copy."""

    def __init__(self, max_num_logits: int) -> None:
        self.memory = {
            "token_ids": torch.empty(max_num_logits, dtype=torch.int64, pin_memory=True),
            "failed": torch.empty(max_num_logits, dtype=torch.bool, pin_memory=True),
        }
        self.sampled, self.copied = torch.cuda.Event(), torch.cuda.Event()


class OutputBuffers:
    """The stream that outputs are copied on, and the buffers that they are copied to.

    An output holds its buffer until it is read, and a later step takes it over. Memory and events of a step's own cost
    the host more calls of the CUDA API than the copies do: torch's allocator of pinned memory records an event for
    each piece that is given up, and asks for each of these before it hands out another.
    """

    def __init__(self, device: torch.device, max_num_logits: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self._max_num_logits = max_num_logits
        self._idle: list[OutputBuffer] = []

    def take(self) -> OutputBuffer:
        """A buffer that no output holds."""
        return self._idle.pop() if self._idle else OutputBuffer(self._max_num_logits)

    def give_back(self, buffer: OutputBuffer) -> None:
        """Take in a buffer that has been read."""
        self._idle.append(buffer)


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
        buffers: OutputBuffers | None,
        scored: ScoredTokens | None = None,
    ) -> None:
        """max_sampled: columns of the result, K + 1. Rows of `sampled` past the batch's logits are padding.
        buffers: None without a GPU.
        """
        self._scored = scored
        self._num_reqs, self._num_logits, self._max_sampled = batch.num_reqs, batch.num_logits, max_sampled
        self._cu_num_logits = batch.cu_num_logits_np
        self._once_each = max_sampled == 1 and batch.num_logits == batch.num_reqs
        others = {
            "logprob_token_ids": sampled.logprob_token_ids,
            "logprob_values": sampled.logprob_values,
            "sampled_ranks": sampled.sampled_ranks,
        }
        if scored is not None:
            others |= scored.tensors()
        self._device = {name: tensor for name, tensor in others.items() if tensor is not None}
        self._device |= {"token_ids": sampled.token_ids, "failed": sampled.failed}
        self._output: ModelRunnerOutput | None = None
        self._buffers = buffers
        self._buffer: OutputBuffer | None = None
        self._source: torch.cuda.Stream | None = None
        if buffers is None:
            # The sources may be buffers that the next step overwrites, and on a CPU `to` makes no copy.
            self._host = {name: tensor.clone() for name, tensor in self._device.items()}
        else:
            self._buffer = buffers.take()
            self._host = self._start_copy(buffers.stream, self._buffer)

    def _start_copy(self, stream: torch.cuda.Stream, buffer: OutputBuffer) -> dict[str, torch.Tensor]:
        self._source = torch.cuda.current_stream(stream.device)
        buffer.sampled.record(self._source)
        stream.wait_event(buffer.sampled)
        with torch.cuda.stream(stream):
            host = {
                name: buffer.memory[name][: len(tensor)].copy_(tensor, non_blocking=True)
                if name in buffer.memory
                else tensor.to("cpu", non_blocking=True)
                for name, tensor in self._device.items()
            }
            buffer.copied.record(stream)
        return host

    def release(self) -> None:
        """Have the stream that sampled wait until the copy is done, which it nearly always is."""
        if self._buffer is not None and self._source is not None:
            self._source.wait_event(self._buffer.copied)

    def wait(self) -> None:
        """Wait until everything is on the host."""
        if self._buffer is not None:
            self._buffer.copied.synchronize()

    def get_output(self) -> ModelRunnerOutput:
        """Wait for this step's tokens and lay them out by batch row."""
        if self._output is None:
            self.wait()
            self._output = self._lay_out()
            self._device.clear()
            self._host.clear()
            if self._buffers is not None and self._buffer is not None:
                self._buffers.give_back(self._buffer)
                self._buffer = None
        return self._output

    def _lay_out(self) -> ModelRunnerOutput:
        """What is on the host, by batch row; ids and failures are copied, since their memory serves a later step."""
        host = {name: tensor.numpy() for name, tensor in self._host.items()}
        token_ids = host["token_ids"][: self._num_logits].astype(np.int32)
        failed = host["failed"][: self._num_logits].copy()
        logprobs = None
        if "logprob_values" in host:
            logprobs = Logprobs(
                token_ids=self._by_row(host["logprob_token_ids"]),
                values=self._by_row(host["logprob_values"]),
                ranks=self._by_row(host["sampled_ranks"]),
            )
        return ModelRunnerOutput(
            sampled_token_ids=self._by_row(token_ids),
            num_sampled=np.diff(self._cu_num_logits),
            num_rejected=np.zeros(self._num_reqs, np.int32),  # nothing that is drafted is verified yet
            failed=failed if self._once_each else self._by_row(failed).max(axis=1),
            logprobs=logprobs,
            prompt_logprobs={} if self._scored is None else self._scored.by_row(host),
        )

    def _by_row(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[num_logits, ...] to [num_reqs, K + 1, ...]; cells that were not sampled are 0."""
        if self._once_each:
            return flat[:, None]
        num_logits = np.diff(self._cu_num_logits)
        rows = np.repeat(np.arange(self._num_reqs), num_logits)
        columns = np.arange(len(rows)) - self._cu_num_logits[rows]
        out = np.zeros((self._num_reqs, self._max_sampled, *flat.shape[1:]), flat.dtype)
        out[rows, columns] = flat
        return out
