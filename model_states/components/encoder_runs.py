"""`EncoderRuns`: the encoder on a stream of its own, so that decode steps go on beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from model_states.kernels.write_entries import write_entries
from model_states.staged import HostToDevice


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


class PooledLayer(Protocol):
    """Where one decoder layer's keys and values go, [num_entries, num_kv_heads, max_positions, head_size] each."""

    key_pool: torch.Tensor
    value_pool: torch.Tensor


class Fill(NamedTuple):
    """An entry whose content is to come."""

    key: bytes
    entry: int
    model_inputs: Mapping[str, Any]


class _Run(NamedTuple):
    """Fills on their way; the inputs live until they are done, since another stream reads them."""

    fills: Sequence[Fill]
    done: torch.cuda.Event | None  # None is done

    @property
    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())


class EncoderRuns:
    """Fills entries in batches, each behind everything that was launched before it, whatever the stream.

    num_encoded: inputs that the encoder has run on.
    """

    def __init__(
        self,
        encoder: Encoder,
        layers: Sequence[PooledLayer],
        projections: Sequence[Projection],
        device: torch.device,
    ) -> None:
        self._encoder, self._layers, self._projections = encoder, layers, projections
        self._device, self._transfer = device, HostToDevice(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._running: deque[_Run] = deque()
        self._joined: deque[_Run] = deque()
        self.num_encoded = 0

    @property
    def num_running(self) -> int:
        """Runs that are neither joined nor known to be done."""
        return len(self._running)

    def launch(self, fills: Sequence[Fill]) -> None:
        """Start a run."""
        if self._stream is None:
            self._fill(fills)
            self._running.append(_Run(fills, None))
        else:
            # What is in flight may read the entries' old content, and may be what makes the inputs.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._fill(fills)
                done = torch.cuda.Event()
                done.record()
            self._running.append(_Run(fills, done))
        self.num_encoded += len(fills)

    def take_done(self) -> list[Fill]:
        """Fills that are done now and were not joined."""
        while self._joined and self._joined[0].is_done:
            self._joined.popleft()
        fills: list[Fill] = []
        while self._running and self._running[0].is_done:
            fills += self._running.popleft().fills
        return fills

    def join(self) -> list[Fill]:
        """Have the current stream go on when all runs are done, without the host; gives the fills of these."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        fills = [fill for run in self._running for fill in run.fills]
        self._joined += self._running
        self._running.clear()
        return fills

    def measure(self, count: int) -> None:
        """Run the largest batch for nothing, so that its memory is known."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._projections[0](self._encoder.encode([self._encoder.largest_inputs()] * count))
            self.join()

    def _fill(self, fills: Sequence[Fill]) -> None:
        entries = torch.empty(len(fills), dtype=torch.int64, device=self._device)
        self._transfer.copy(np.array([fill.entry for fill in fills]), entries)
        hidden_states = self._encoder.encode([fill.model_inputs for fill in fills])
        for layer, project in zip(self._layers, self._projections, strict=True):
            for pool, part in zip((layer.key_pool, layer.value_pool), project(hidden_states), strict=True):
                write_entries(pool, entries, part)
