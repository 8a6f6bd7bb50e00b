"""Recorded forwards: the forward of a decode step as one CUDA graph, replayed with every step's own lengths.

A PyTorch operation costs the host some 10 us to issue, and a model has hundreds; a replay costs a few microseconds
in all. Kernels take their lengths from device buffers whose addresses never change, so one graph serves every step
that fits its number of rows; the rows left over are null rows.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import torch

from core_runner.scheduling.output import SchedulerOutput
from model_states import InputBatch, ModelState

logger = logging.getLogger(__name__)


class ForwardGraphs:
    """One graph for each bucket of rows, recorded when a step first needs it.

    Only steps in which every row has one token are replayed; others run eagerly. A model that cannot be recorded
    is noticed at the first attempt, logged, and runs eagerly from then on.
    """

    def __init__(self, model_state: ModelState, max_num_reqs: int, enabled: bool) -> None:
        """enabled: whether the device and the model state can record at all."""
        self._model_state = model_state
        small = [rows for rows in (1, 2, 4, 8, 16) if rows < max_num_reqs]
        self.buckets = [*small, *range(32, max_num_reqs, 32), max_num_reqs] if enabled else []
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None  # the graphs share their memory: one runs at a time

    @property
    def num_recorded(self) -> int:
        """Graphs recorded so far."""
        return len(self._recorded)

    def bucket(self, step: SchedulerOutput) -> int | None:
        """Rows to pad the step to, or None where it must run eagerly."""
        if not self.buckets or step.num_reqs == 0 or int(step.num_scheduled_tokens.max()) > 1:
            return None
        bucket: int = self.buckets[bisect_left(self.buckets, step.num_reqs)]
        return bucket

    def forward(
        self, batch: InputBatch, inputs: Mapping[str, torch.Tensor], bucket: int | None
    ) -> torch.Tensor:
        """Hidden states of the batch; those of a replay are overwritten by the next one in stream order."""
        recorded = self._recorded.get(bucket) if bucket is not None else None
        if recorded is not None:
            graph, hidden_states = recorded
            graph.replay()
            return hidden_states
        # Once outside the recording: it compiles what is missing, and it is this step's result, so that
        # state which each run advances is advanced once.
        hidden_states = self._model_state.forward(batch, **inputs)
        if bucket is not None and self.buckets:
            self._record(batch, inputs, bucket)
        return hidden_states

    def _record(self, batch: InputBatch, inputs: Mapping[str, torch.Tensor], bucket: int) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                hidden_states = self._model_state.forward(batch, **inputs)
        except RuntimeError as error:
            logger.warning(
                "%s cannot be recorded as a CUDA graph (%s); its steps run eagerly",
                self._model_state.name,
                str(error).splitlines()[0],
            )
            self.buckets = []
            return
        self._pool = graph.pool()
        self._recorded[bucket] = graph, hidden_states
