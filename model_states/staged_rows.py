"""Rows of megabytes on their way from the host to a device."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from model_states.staged import Event, HostToDevice

_MOST_PINNED: Final = 16 << 20  # bytes of an array; the system takes long over more, and few are longer


def host_array(shape: Sequence[int], device: torch.device) -> npt.NDArray[np.float32]:
    """float32 on the host, of any content; where it is small, a GPU reads it without the host's help."""
    if device.type != "cuda" or 4 * math.prod(shape) > _MOST_PINNED:
        return np.empty(tuple(shape), np.float32)
    array: npt.NDArray[np.float32] = torch.empty(tuple(shape), dtype=torch.float32, pin_memory=True).numpy()
    return array


class RowsToDevice(HostToDevice):
    """As `HostToDevice`, for several arrays at a time.

    A megabyte takes the host a while, so threads share those that are not from `host_array`.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        # Arrays, by when they may be let go of.
        self._read: deque[tuple[Event, Sequence[npt.NDArray[Any]]]] = deque()

    def copy_rows(self, arrays: Sequence[npt.NDArray[Any]], out: torch.Tensor) -> None:
        """Write each array [n] to the start of its row of `out` [len(arrays), at least n], and zeros behind it.

        `out` is contiguous and of the arrays' dtype. What is not from `host_array` may be changed as soon as this
        returns.
        """
        if self._device.type == "cpu":
            for row, array in zip(out.numpy(), arrays, strict=True):
                _fill(row, array)
            return
        places = [place for place, array in enumerate(arrays) if not _is_pinned(array)]
        if places:
            self._copy_staged([arrays[place] for place in places], [out[place] for place in places])
        direct = [place for place in range(len(arrays)) if place not in set(places)]
        for place in direct:
            row, array = out[place], arrays[place]
            row[: len(array)].copy_(torch.from_numpy(array), non_blocking=True)
            if len(array) < len(row):
                row[len(array) :].zero_()
        self._hold([arrays[place] for place in direct])

    def _copy_staged(self, arrays: Sequence[npt.NDArray[Any]], rows: Sequence[torch.Tensor]) -> None:
        buffer = self._pool.take(sum(row.nbytes for row in rows))
        pinned = buffer.data[: sum(row.nbytes for row in rows)].view(rows[0].dtype).view(len(rows), -1)
        list(_threads().map(_fill, pinned.numpy(), arrays))
        for row, source in zip(rows, pinned, strict=True):
            row.copy_(source, non_blocking=True)
        buffer.event.record()

    def _hold(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Keep arrays that the device reads until it has: their memory is somebody else's as soon as it is free."""
        while self._read and self._read[0][0].query():
            self._read.popleft()
        if arrays:
            event: Event = torch.cuda.Event()
            event.record()
            self._read.append((event, arrays))


def _is_pinned(array: npt.NDArray[Any]) -> bool:
    # torch warns of arrays that must not be written to, and none of ours is like that.
    return array.flags.writeable and torch.from_numpy(array).is_pinned()


def _fill(row: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
    np.copyto(row[: len(array)], array)
    row[len(array) :] = 0


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "core-runner-copy")
