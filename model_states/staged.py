"""Persistent device tensors that the host changes by differences, and pinned memory retired by events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from model_states.kernels.staged_write import staged_write

if TYPE_CHECKING:
    from model_states.staged_writer import StagedWriter

logger = logging.getLogger(__name__)

_LEAST_BYTES = 4096
# Triton compiles a kernel anew for a pointer that is not a multiple of 16.
_ALIGNMENT = 16


class Event(Protocol):
    """The part of `torch.cuda.Event` that retires a buffer."""

    def query(self) -> bool:
        """Whether everything before the last `record` has run; True before the first one."""

    def record(self) -> None:
        """Mark this point of the current stream."""


@dataclass(slots=True)
class PinnedBuffer:
    """Host bytes that a copy may be reading until `event` is done."""

    data: torch.Tensor  # uint8 [capacity]
    event: Event


class PinnedPool:
    """Buffers that are handed out again only when their event is done, however many steps that takes."""

    def __init__(self, allocate: Callable[[int], PinnedBuffer]) -> None:
        self._allocate = allocate
        self._buffers: list[PinnedBuffer] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self, num_bytes: int) -> PinnedBuffer:
        """An idle buffer of at least `num_bytes`; the caller records its event after the last use."""
        idle = next((i for i, buffer in enumerate(self._buffers) if buffer.event.query()), None)
        if idle is None:
            self._buffers.append(self._allocate(_capacity(num_bytes)))
            return self._buffers[-1]
        buffer = self._buffers.pop(idle)
        if buffer.data.numel() < num_bytes:
            buffer = self._allocate(_capacity(num_bytes))
        # Newest last, so that the search above meets the longest retired one first.
        self._buffers.append(buffer)
        return buffer


class HostToDevice:
    """Copies host arrays to a device without waiting for it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pool = PinnedPool(_allocate_pinned)

    def copy(self, array: npt.NDArray[Any], out: torch.Tensor) -> None:
        """Write `array`, flattened, to `out[: array.size]` in the order of the current stream.

        `out` is one-dimensional and of array's dtype. The array may be changed as soon as this returns.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        source = torch.from_numpy(flat)
        target = out[: source.numel()]
        assert (source.dtype, source.shape) == (out.dtype, target.shape)
        if self._device.type == "cpu":
            target.copy_(source)
            return
        buffer = self._pool.take(source.nbytes)
        pinned = buffer.data[: source.nbytes].view(source.dtype)
        # Not by torch, which would wake a thread for every core, and wait for all of them, to copy a megabyte.
        np.copyto(pinned.numpy(), flat)
        target.copy_(pinned, non_blocking=True)
        buffer.event.record()


class Runs(NamedTuple):
    """Runs of a staged tensor: run i goes to row rows[i] from column starts[i] on."""

    rows: npt.NDArray[np.int64]  # [num_runs]
    starts: npt.NDArray[np.int64]  # [num_runs]
    lengths: npt.NDArray[np.int64]  # [num_runs]
    values: npt.NDArray[Any]  # [sum(lengths)]


class StagedTensor:
    """A device tensor [rows] or [rows, cols] of lasting address; the host stages runs, `apply` writes them.

    `stage*` copy what they are given. A later write wins over an earlier one to the same place, even in one `apply`.
    Consumers on the stream of `apply` see every write staged before it and none staged later. uva=True keeps the tensor
    in pinned host memory that kernels read in place, for a large table of which a step touches little; where that is
    impossible it is device memory, and the log says so. With a writer, its next `flush` does what `apply` would write.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        fill: float = 0,
        uva: bool = False,
        transfer: HostToDevice | None = None,
        writer: StagedWriter | None = None,
    ) -> None:
        assert len(shape) in (1, 2)
        device = torch.device(device)
        mapped = uva_tensor(shape, dtype, device) if uva and device.type == "cuda" else None
        self.is_uva = mapped is not None
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device=device) if mapped is None else mapped
        self.tensor.fill_(fill)
        self._table = self.tensor.view(shape[0], -1)
        self._num_rows, self._num_cols = self._table.shape
        self._np_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._transfer = transfer or HostToDevice(device)
        self._packed = torch.empty(_LEAST_BYTES, dtype=torch.uint8, device=device)
        self._writer = writer
        self._staged: list[Runs] = []
        self._singles: list[tuple[int, int, npt.NDArray[Any]]] = []  # staged after all of `_staged`

    @property
    def dirty(self) -> bool:
        """Whether `apply` has something to write."""
        return bool(self._staged or self._singles)

    def stage(self, row: int, start: int, values: npt.ArrayLike) -> None:
        """Queue one run of values for `row` from column `start` on (0 for a one-dimensional tensor)."""
        flat = np.array(values, dtype=self._np_dtype).reshape(-1)
        assert 0 <= row < self._num_rows
        assert 0 <= start <= self._num_cols - flat.size
        if flat.size:
            self._singles.append((row, start, flat))

    def stage_rows(self, rows: npt.ArrayLike, values: npt.ArrayLike, column: int = 0) -> None:
        """Queue one value for each row: rows [n], values [n] or one for all."""
        rows = np.array(rows, dtype=np.int64).reshape(-1)
        flat = np.broadcast_to(np.asarray(values, dtype=self._np_dtype), rows.shape)
        self.stage_runs(rows, np.full_like(rows, column), np.ones_like(rows), flat)

    def stage_runs(
        self, rows: npt.ArrayLike, starts: npt.ArrayLike, lengths: npt.ArrayLike, flat_values: npt.ArrayLike
    ) -> None:
        """Queue runs: rows, starts and lengths [num_runs], flat_values [sum(lengths)] one after another."""
        runs = Runs(
            np.array(rows, dtype=np.int64),
            np.array(starts, dtype=np.int64),
            np.array(lengths, dtype=np.int64),
            np.array(flat_values, dtype=self._np_dtype),
        )
        if runs.values.size == 0:
            return
        assert runs.rows.shape == runs.starts.shape == runs.lengths.shape
        assert _all_in_range(runs.rows, self._num_rows - 1)
        assert _all_in_range(runs.starts, self._num_cols)
        assert _all_in_range(runs.lengths, self._num_cols)
        assert _all_in_range(runs.starts + runs.lengths, self._num_cols)
        assert np.add.reduce(runs.lengths) == runs.values.size
        self._gather_singles()
        self._staged.append(runs)

    def _gather_singles(self) -> None:
        """Make runs of single stages, which come one by one for each admission."""
        if self._singles:
            rows, starts, values = zip(*self._singles, strict=True)
            lengths = np.array([len(part) for part in values])
            self._staged.append(Runs(np.array(rows), np.array(starts), lengths, np.concatenate(values)))
            self._singles = []

    def apply(self) -> None:
        """Write everything staged with one copy to the device and one kernel; nothing when not dirty."""
        self._gather_singles()
        if not self._staged:
            return
        many, self._staged = self._staged, []
        staged = many[0] if len(many) == 1 else Runs(*map(np.concatenate, zip(*many, strict=True)))
        runs = _keep_last_writes(staged, self._num_cols)
        if self._writer is None:
            self.write(runs)
        else:
            self._writer.add(self, runs)

    def write(self, runs: Runs) -> None:
        """Write runs of which no two touch the same place, by a copy and a kernel."""
        values_bytes = -(-runs.values.nbytes // _ALIGNMENT) * _ALIGNMENT
        meta_bytes = 4 * (3 * len(runs.rows) + 1)
        self._copy_packed(_pack(runs, values_bytes, meta_bytes))
        values = self._packed[: runs.values.nbytes].view(self.tensor.dtype)
        meta = self._packed[values_bytes : values_bytes + meta_bytes].view(torch.int32)
        staged_write(self._table, meta, values, int(runs.lengths.max()))

    def addresses(self, runs: Runs) -> npt.NDArray[np.int64]:
        """Where the device finds the first place of each run."""
        return self.tensor.data_ptr() + self.tensor.itemsize * (runs.rows * self._num_cols + runs.starts)

    def _copy_packed(self, packed: npt.NDArray[np.uint8]) -> None:
        if packed.size > self._packed.numel():
            self._packed = torch.empty(_capacity(packed.size), dtype=torch.uint8, device=self._packed.device)
        self._transfer.copy(packed, self._packed)


def uva_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """A zeroed tensor of `device` in pinned host memory; None and a logged line where that fails."""
    try:
        host = torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)
        mapped = torch.as_tensor(_CudaArray(host), device=device)
        _check_mapping(host, mapped)
    except (RuntimeError, TypeError, ValueError) as error:
        logger.warning(
            "table %s stays in device memory: host memory cannot be mapped (%s)", tuple(shape), error
        )
        return None
    return mapped


class _CudaArray:
    """Lets `torch.as_tensor` alias pinned host memory; under UVA its address is the device's address too."""

    def __init__(self, host: torch.Tensor) -> None:
        # torch holds this object as long as the aliasing tensor, and so the memory lives as long as that.
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": host.numpy().dtype.str,
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def _check_mapping(host: torch.Tensor, mapped: torch.Tensor) -> None:
    """Prove that both names see the same bytes; runs once, at allocation, where waiting is allowed."""
    if mapped.data_ptr() != host.data_ptr() or not mapped.is_cuda:
        raise RuntimeError("the device made a copy")
    mapped.view(-1)[-1:].fill_(1)
    torch.cuda.synchronize(mapped.device)
    if host.view(-1)[-1] != 1:
        raise RuntimeError("a device write did not reach the host")
    host.zero_()


def _allocate_pinned(num_bytes: int) -> PinnedBuffer:
    event: Event = torch.cuda.Event()
    return PinnedBuffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), event)


def _capacity(num_bytes: int) -> int:
    return max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())


def _pack(runs: Runs, values_bytes: int, meta_bytes: int) -> npt.NDArray[np.uint8]:
    """One array of bytes: values padded to `values_bytes`, then int32 rows, starts and cu_lengths."""
    packed = np.empty(values_bytes + meta_bytes, dtype=np.uint8)
    packed[: runs.values.nbytes] = runs.values.view(np.uint8)
    num_runs = len(runs.rows)
    meta = packed[values_bytes:].view(np.int32)
    meta[:num_runs] = runs.rows
    meta[num_runs : 2 * num_runs] = runs.starts
    meta[2 * num_runs] = 0
    np.cumsum(runs.lengths, out=meta[2 * num_runs + 1 :], dtype=np.int32)
    return packed


def _all_in_range(values: npt.NDArray[np.int64], last: int) -> bool:
    # As unsigned numbers negative ones are the largest: one pass instead of two.
    return bool(np.maximum.reduce(values.view(np.uint64)) <= last)


def _keep_last_writes(runs: Runs, num_cols: int) -> Runs:
    """The same runs if no two touch the same place, else single values of which only the last is kept."""
    if len(runs.rows) == 1:
        return runs
    first = runs.rows * num_cols + runs.starts
    order = np.argsort(first, kind="stable")
    ends = first[order] + runs.lengths[order]
    if not np.any(first[order][1:] < ends[:-1]):
        return runs
    run_starts = np.cumsum(runs.lengths) - runs.lengths
    places = np.repeat(first - run_starts, runs.lengths) + np.arange(runs.values.size)
    kept, from_end = np.unique(places[::-1], return_index=True)
    values = runs.values[::-1][from_end]
    return Runs(kept // num_cols, kept % num_cols, np.ones_like(kept), values)
