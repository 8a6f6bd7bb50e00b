"""Rows of megabytes on their way from the host to a device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model_states.staged import HostToDevice


class RowsToDevice(HostToDevice):
    """As `HostToDevice`, for several arrays at a time, which threads share: a megabyte takes the host a while."""

    def copy_rows(self, arrays: Sequence[npt.NDArray[Any]], out: torch.Tensor) -> None:
        """Write each array [n] to the start of its row of `out` [len(arrays), at least n], and zeros behind it.

        `out` is contiguous and of the arrays' dtype. The arrays may be changed as soon as this returns.
        """
        if self._device.type == "cpu":
            for row, array in zip(out.numpy(), arrays, strict=True):
                _fill(row, array)
            return
        buffer = self._pool.take(out.nbytes)
        pinned = buffer.data[: out.nbytes].view(out.dtype).view(out.shape)
        list(_threads().map(_fill, pinned.numpy(), arrays))
        out.copy_(pinned, non_blocking=True)
        buffer.event.record()


def _fill(row: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
    np.copyto(row[: len(array)], array)
    row[len(array) :] = 0


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "core-runner-copy")
