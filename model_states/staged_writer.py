"""What several staged tensors have for one step, in one copy to the device and one kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.write_runs import write_runs
from model_states.staged import HostToDevice, Runs, StagedTensor

_LEAST_WORDS = 4096


class StagedWriter:
    """Takes the runs of tensors that were made with it when they are applied, and writes all of them by `flush`.

    Each copy and each launch takes the host as long as staging dozens of requests. Tensors are of 4-byte values.
    Where there is no Triton each tensor writes for itself.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._transfer = HostToDevice(device)
        self._packed = torch.empty(_LEAST_WORDS, dtype=torch.int32, device=device)
        self._parts: list[tuple[StagedTensor, Runs]] = []

    @property
    def is_empty(self) -> bool:
        """Whether `flush` has nothing to write."""
        return not self._parts

    def add(self, tensor: StagedTensor, runs: Runs) -> None:
        """Take runs of which no two touch the same place."""
        # A step that failed may have left some, and programs of one launch have no order.
        if any(tensor is other for other, _ in self._parts):
            self.flush()
        assert tensor.tensor.itemsize == 4
        self._parts.append((tensor, runs))

    def flush(self) -> None:
        """Write everything, in line with the steps on the current stream."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        if not use_triton(self._packed):
            for tensor, runs in parts:
                tensor.write(runs)
            return
        num_runs, max_length, packed = _pack(parts)
        if packed.size > self._packed.numel():
            self._packed = self._packed.new_empty(1 << (packed.size - 1).bit_length())
        self._transfer.copy(packed, self._packed)
        write_runs(self._packed, num_runs, max_length)


def _pack(parts: list[tuple[StagedTensor, Runs]]) -> tuple[int, int, npt.NDArray[np.int32]]:
    """How many runs there are, the longest one's length, and all of them as the kernel reads them."""
    addresses = np.concatenate([tensor.addresses(runs) for tensor, runs in parts])
    lengths = np.concatenate([runs.lengths for _, runs in parts])
    num_runs, num_values = len(lengths), sum(len(runs.values) for _, runs in parts)
    packed = np.empty(3 * num_runs + 1 + num_values, np.int32)
    packed[: 2 * num_runs] = addresses.view(np.int32)
    packed[2 * num_runs] = 0
    np.cumsum(lengths, out=packed[2 * num_runs + 1 : 3 * num_runs + 1], dtype=np.int32)
    np.concatenate([runs.values.view(np.int32) for _, runs in parts], out=packed[3 * num_runs + 1 :])
    return num_runs, int(lengths.max()), packed
