"""`SlotProcessors`: the logits processors that plugins brought, and which slots ask for which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from core_runner.errors import SchedulerOutputError
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import NewRequest
from model_states.batch import InputBatch
from model_states.errors import PluginHookError
from model_states.logits_processor import LogitsProcessor, LogitsRows
from model_states.staged import HostToDevice


class SlotProcessors:
    """Runs processors on the rows that ask for them; a step in which no row asks costs nothing.

    processors: in the order in which they run, with names of their own. vocab_size: columns they are given.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        for processor in processors:
            _check_processor(processor)
        self._processors = {processor.name: processor for processor in processors}
        self._asks_np: npt.NDArray[np.bool_] = np.zeros((len(processors), max_num_reqs + 1), dtype=np.bool_)
        self._changed: set[str] = set()
        self._vocab_size, self._device = vocab_size, device
        self._transfer = HostToDevice(device)

    def explain_refusal(self, params: SamplingParams) -> str | None:
        """Why these parameters cannot be served, as an error message; None if they can. Changes nothing."""
        for name, options in params.logits_processors.items():
            processor = self._processors.get(name)
            if processor is None:
                installed = ", ".join(map(repr, self._processors)) or "none"
                return f"logits_processors asks for {name!r}, which nothing brings; installed: {installed}"
            try:
                processor.validate(options)
            except Exception as error:  # a plugin's fault must not end the other requests
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                return f"logits_processors[{name!r}]={options!r}: {kind}{error}"
        return None

    def validate(self, new_requests: Sequence[NewRequest]) -> None:
        """Raise `SchedulerOutputError` for an admission whose processors or options cannot be served."""
        for new in new_requests:
            problem = self.explain_refusal(new.sampling_params)
            if problem is not None:
                raise SchedulerOutputError(f"request {new.req_id!r}: {problem}")

    def add(self, new: NewRequest) -> None:
        """Tell the processors that a request asks for about its slot."""
        wanted = new.sampling_params.logits_processors
        for row, (name, processor) in enumerate(self._processors.items()):
            if name in wanted:
                processor.add_request(new.slot, new, wanted[name])
                self._asks_np[row, new.slot] = True
                self._changed.add(name)

    def remove(self, slot: int) -> None:
        """Tell the processors that the slot's request asked for."""
        for row, processor in enumerate(self._processors.values()):
            if self._asks_np[row, slot]:
                self._asks_np[row, slot] = False
                processor.remove_request(slot)

    def apply_staged_writes(self) -> None:
        """Let the processors that got a request send what they staged."""
        if self._changed:
            for name, processor in self._processors.items():
                if name in self._changed:
                    processor.apply_staged_writes()
            self._changed.clear()

    def are_wanted(self, slots: npt.NDArray[np.int32]) -> bool:
        """Whether any of `slots` asks for a processor."""
        return bool(self._asks_np[:, slots].any())

    def apply(self, logits: torch.Tensor, working: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Run the processors that rows of the step ask for; returns the changed logits.

        logits: what the model gave, [num_logits, >= vocab_size]; never changed. working: `logits` itself, or a
        float32 copy [num_logits, vocab_size], which is then changed in place. `working` is returned if no row asks.
        """
        slots = batch.idx_mapping_np
        asks = self._asks_np[:, slots]
        if not asks.any():
            return working
        counts = np.diff(batch.cu_num_logits_np)
        indices = [np.flatnonzero(np.repeat(ask, counts)) for ask in asks]
        if not any(map(len, indices)):
            return working
        if working is logits:
            working = logits[:, : self._vocab_size].to(torch.float32, copy=True)
        on_device = self._upload(indices)
        for processor, host, rows in zip(self._processors.values(), indices, on_device, strict=True):
            if not len(host):
                continue
            if len(host) == len(working):
                processor.process(working, _describe(rows, batch))
                continue
            # A copy of the asking rows: the others cannot be touched, whatever a processor does.
            own = working[rows]
            processor.process(own, _describe(rows, batch))
            working[rows] = own
        return working

    def _upload(self, indices: Sequence[npt.NDArray[np.int64]]) -> tuple[torch.Tensor, ...]:
        """The rows of each processor on the device, in one copy."""
        flat = np.concatenate(indices)
        target = torch.empty(len(flat), dtype=torch.int64, device=self._device)
        self._transfer.copy(flat, target)
        parts: tuple[torch.Tensor, ...] = target.split([len(part) for part in indices])
        return parts


def _describe(rows: torch.Tensor, batch: InputBatch) -> LogitsRows:
    tokens = batch.logits_indices[rows]
    return LogitsRows(
        slots=batch.expanded_idx_mapping[rows].to(torch.int64),
        positions=batch.positions[tokens] + 1,
        last_token_ids=batch.input_ids[tokens],
    )


def _check_processor(processor: object) -> None:
    if not isinstance(processor, LogitsProcessor):
        raise PluginHookError(
            f"logits_processors: {processor!r} is no LogitsProcessor; return instances of a subclass"
        )
    if not isinstance(getattr(processor, "name", None), str) or not processor.name:
        raise PluginHookError(f"logits_processors: {type(processor).__qualname__} has no name; set one")
