"""`EncoderRuns`: the encoder on a stream of its own, so that decode steps go on beside it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from model_states.components.kept_outputs import KeptOutputs
from model_states.recording import Recorder
from model_states.staged import HostToDevice

logger = logging.getLogger(__name__)

_MAX_RECORDED: Final = 32  # shapes


class Encoder(Protocol):
    """What runs once for each distinct model input; it keeps nothing of them."""

    max_positions: int  # of one output

    def content_key(self, model_inputs: Mapping[str, Any]) -> bytes:
        """Bytes that name the inputs' content; `ValueError`, saying how to fix it, if they cannot be served."""

    def num_positions(self, model_inputs: Mapping[str, Any]) -> int:
        """Positions of the output, in [1, max_positions]."""

    def largest_inputs(self) -> Mapping[str, Any]:
        """Inputs that take as much memory as any, to measure it."""

    def stage(self, inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """What `forward` reads of n inputs, a new tensor on the device. Must not wait for the device."""

    def forward(self, staged: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, num_positions of the longest, hidden_size]; what lies behind a shorter one is nobody's.

        Must not wait for the device, and launches what `staged`'s shape alone decides: it may be recorded.
        """


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


class _Recorded(NamedTuple):
    """A run that was recorded, with the buffers that it reads."""

    staged: torch.Tensor
    places: torch.Tensor
    replay: Callable[[], None]


class EncoderRuns:
    """Fills entries in batches, each behind everything that was launched before it, whatever the stream.

    A run whose shape has been met before is recorded: an encoder's launches take the host longer than a device takes
    for an input or two. num_encoded: inputs that the encoder has run on.
    """

    def __init__(
        self,
        encoder: Encoder,
        kept: KeptOutputs,
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: None records nothing."""
        self._encoder, self._kept = encoder, kept
        self._device, self._transfer = device, HostToDevice(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._running: deque[_Run] = deque()
        self._joined: deque[_Run] = deque()
        self._recorder = recorder
        self._recorded: dict[torch.Size, _Recorded] = {}
        self._met: set[torch.Size] = set()
        self._refused: set[torch.Size] = set()  # their recording failed
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
                staged = self._encoder.stage([self._encoder.largest_inputs()] * count)
                self._kept.measure(self._encoder.forward(staged))
            self.join()

    def _fill(self, fills: Sequence[Fill]) -> None:
        # Entry and length of each output.
        places = torch.empty((2, len(fills)), dtype=torch.int64, device=self._device)
        lengths = [self._encoder.num_positions(fill.model_inputs) for fill in fills]
        self._transfer.copy(np.array([[fill.entry for fill in fills], lengths]), places.view(-1))
        staged = self._encoder.stage([fill.model_inputs for fill in fills])
        recorded = self._recorded.get(staged.shape)
        if recorded is None:
            self._write(staged, places)
            self._record(staged, places)
        else:
            recorded.staged.copy_(staged)
            recorded.places.copy_(places)
            recorded.replay()

    def _record(self, staged: torch.Tensor, places: torch.Tensor) -> None:
        """Record what has just been run, if its shape was met before."""
        shape = staged.shape
        is_due = shape in self._met and shape not in self._refused and len(self._recorded) < _MAX_RECORDED
        self._met.add(shape)
        if self._recorder is None or not is_due:
            return
        try:
            replay = self._recorder.record(lambda: self._write(staged, places))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            logger.warning(
                "an encoder batch of %d cannot be recorded as a CUDA graph (%s); such batches run without one",
                shape[0],
                reason,
            )
            self._refused.add(shape)
        else:
            self._recorded[shape] = _Recorded(staged, places, replay)

    def _write(self, staged: torch.Tensor, places: torch.Tensor) -> None:
        self._kept.write(self._encoder.forward(staged), *places)
