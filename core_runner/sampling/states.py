"""`SamplerStates`: what each slot asks of the sampler, on the device and partly on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core_runner.sampling.logit_options import LogitOptions, changes_logits
from core_runner.sampling.rows import SamplingRows
from core_runner.sampling_params import SamplingParams
from model_states.batch import InputBatch
from model_states.staged import StagedTensor
from model_states.staged_writer import StagedWriter

# Above it, temperature times noise would leave float32; the logits are negligible long before.
_MAX_TEMPERATURE = 1e30
# One row of the table: temperature, top_p, min_p (float32), top_k (int32), seed (int64, so an even column).
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _SEED, _COLUMNS = 0, 1, 2, 3, 4, 6


class SamplerStates:
    """Sampling parameters of every slot; row R is the null slot, which is greedy and asks for nothing.

    The device tensors, each [R + 1] and all columns of one table, so an admission is one staged row:
    temperature, top_p, min_p float32; top_k int32 (0 keeps all); seed int64. Host mirrors, each [R + 1]:
    `filters_np` (bool, the slot needs a threshold), `num_logprobs_np` (int32, -1 for none) and
    `wants_raw_np` (bool, they are raw ones). `logit_options` holds what changes logits; without it no request
    may ask for that.
    """

    def __init__(
        self,
        max_num_reqs: int,
        device: torch.device,
        logit_options: LogitOptions | None = None,
        writer: StagedWriter | None = None,
    ) -> None:
        """writer: see `StagedTensor`."""
        self.max_num_reqs = max_num_reqs
        self.logit_options = logit_options
        # One table rather than five tensors: an admission is one run of values and one kernel.
        self._table = StagedTensor((max_num_reqs + 1, _COLUMNS), torch.int32, device, writer=writer)
        self._added: list[tuple[Any, ...]] = []  # slots with their rows, not staged yet
        self._changed: set[int] = (
            set()
        )  # slots whose options the device has, of a request that is there or gone
        floats = self._table.tensor.view(torch.float32)
        self.temperature = floats[:, _TEMPERATURE]
        self.top_p = floats[:, _TOP_P]
        self.min_p = floats[:, _MIN_P]
        self.top_k = self._table.tensor[:, _TOP_K]
        self.seed = self._table.tensor.view(torch.int64)[:, _SEED // 2]
        self.filters_np: npt.NDArray[np.bool_] = np.zeros(max_num_reqs + 1, dtype=np.bool_)
        self.num_logprobs_np: npt.NDArray[np.int32] = np.full(max_num_reqs + 1, -1, dtype=np.int32)
        self.wants_raw_np: npt.NDArray[np.bool_] = np.zeros(max_num_reqs + 1, dtype=np.bool_)

    def add(self, slot: int, params: SamplingParams, seed: int) -> None:
        """Write every field of `slot`; the device sees it after `apply_staged_writes`.

        seed: the request's stream, in [-2^63, 2^63); a resumed request brings the seed it had.
        """
        temperature = min(params.temperature, _MAX_TEMPERATURE)
        top_p, min_p, top_k, logprobs = params.top_p, params.min_p, max(params.top_k, 0), params.logprobs
        self._added.append((slot, temperature, top_p, min_p, top_k, seed))
        filters = top_k > 0 or top_p < 1 or min_p > 0
        self.filters_np[slot] = filters and _filters(temperature, top_k, top_p, min_p)
        self.num_logprobs_np[slot] = -1 if logprobs is None else logprobs
        self.wants_raw_np[slot] = logprobs is not None and params.logprobs_mode == "raw"
        changes = changes_logits(params)
        if changes or slot in self._changed:
            assert self.logit_options is not None, "these sampler states were made without logit options"
            self.logit_options.add(slot, params)
            (self._changed.add if changes else self._changed.discard)(slot)

    def remove(self, slot: int) -> None:
        """Forget what `slot` asked for. The device row stays until the next `add` writes all of it."""
        self.filters_np[slot] = False
        self.num_logprobs_np[slot] = -1
        self.wants_raw_np[slot] = False
        if self.logit_options is not None and slot in self._changed:
            self.logit_options.remove(slot)

    def apply_staged_writes(self) -> None:
        """Bring the rows of new requests to the device, in stream order; nothing if there are none."""
        if self._added:
            self._stage_added()
        self._table.apply()
        if self.logit_options is not None:
            self.logit_options.apply_staged_writes()

    def _stage_added(self) -> None:
        slots, temperature, top_p, min_p, top_k, seed = zip(*self._added, strict=True)
        rows = np.zeros((len(slots), _COLUMNS), dtype=np.int32)
        floats = rows.view(np.float32)
        floats[:, _TEMPERATURE], floats[:, _TOP_P], floats[:, _MIN_P] = temperature, top_p, min_p
        rows[:, _TOP_K] = top_k
        rows.view(np.int64)[:, _SEED // 2] = seed
        starts = np.zeros(len(slots), np.int64)
        self._table.stage_runs(slots, starts, np.full_like(starts, _COLUMNS), rows.reshape(-1))
        self._added = []

    def rows(self, batch: InputBatch, num_logits: int) -> SamplingRows:
        """The kernels' view of a step's first `num_logits` rows of logits."""
        return SamplingRows(
            slots=batch.expanded_idx_mapping[:num_logits],
            logits_indices=batch.logits_indices[:num_logits],
            positions=batch.positions,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )


def _filters(temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether a threshold is needed, by the values as the device has them.

    A temperature too small for float32 becomes 0, greedy: what it would sample anyway.
    """
    if np.float32(temperature) == 0:
        return False
    return bool(top_k > 0 or np.float32(top_p) < 1 or np.float32(min_p) > 0)
