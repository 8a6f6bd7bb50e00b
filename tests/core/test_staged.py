"""Staged tensors against a loop, and pinned buffers against an event that the test turns."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from model_states import staged
from model_states.kernels.staged_write import staged_write
from model_states.staged import HostToDevice, PinnedBuffer, PinnedPool, StagedTensor, uva_tensor


def _write_disjoint(table: torch.Tensor, runs: torch.Tensor, values: torch.Tensor, max_length: int) -> None:
    """A kernel's programs have no order, so no two runs of a launch may touch the same place."""
    num_runs = runs.numel() // 3
    rows, starts, cu = (part.tolist() for part in runs.split([num_runs, num_runs, num_runs + 1]))
    lengths = np.diff(cu).tolist()
    places = [(r, s + i) for r, s, n in zip(rows, starts, lengths, strict=True) for i in range(n)]
    assert len(places) == len(set(places)) == values.numel()
    assert max_length == max(lengths)
    staged_write(table, runs, values, max_length)


@pytest.mark.parametrize("uva", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((7,), torch.int32), ((5, 9), torch.int32), ((5, 9), torch.float32), ((4, 3), torch.int64)],
)
def test_random_stages_equal_a_loop(
    device: torch.device,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    uva: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Overlapping runs of every kind; the later write wins, also within one apply."""
    monkeypatch.setattr(staged, "staged_write", _write_disjoint)
    rng = np.random.default_rng(11)
    table = StagedTensor(shape, dtype, device, fill=-3, uva=uva)
    expected = torch.full(shape, -3, dtype=dtype).view(shape[0], -1)
    num_rows, num_cols = expected.shape
    address = table.tensor.data_ptr()
    for _ in range(40):
        for _ in range(rng.integers(0, 5)):
            num_runs = int(rng.integers(1, 4))
            rows, starts = rng.integers(0, num_rows, num_runs), rng.integers(0, num_cols, num_runs)
            lengths = [int(rng.integers(0, num_cols - start + 1)) for start in starts]
            values = rng.integers(0, 1000, sum(lengths))
            table.stage_runs(rows, starts, lengths, values)
            first = 0
            for row, start, length in zip(rows, starts, lengths, strict=True):
                expected[row, start : start + length] = torch.from_numpy(values[first : first + length])
                first += length
        column = int(rng.integers(0, num_cols))
        table.stage_rows([0, num_rows - 1], [5, 6], column)
        expected[0, column], expected[num_rows - 1, column] = 5, 6
        table.apply()
        assert not table.dirty
        assert torch.equal(table.tensor.cpu(), expected.view(shape))
    assert table.tensor.data_ptr() == address


def test_what_is_staged_waits_for_apply_and_is_a_copy(device: torch.device) -> None:
    table = StagedTensor((3, 4), torch.int32, device)
    values = np.array([1, 2], dtype=np.int32)
    table.stage(1, 2, values)
    values[:] = 99
    assert table.dirty
    assert not table.tensor.any()
    table.apply()
    assert table.tensor.tolist() == [[0] * 4, [0, 0, 1, 2], [0] * 4]


def test_one_copy_and_one_kernel_whatever_was_staged(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    write, copy = staged.staged_write, HostToDevice.copy
    monkeypatch.setattr(staged, "staged_write", lambda *args: (calls.append("kernel"), write(*args)))
    monkeypatch.setattr(HostToDevice, "copy", lambda *args: (calls.append("copy"), copy(*args)))
    table = StagedTensor((50, 40), torch.int32, device)
    table.apply()
    table.stage(3, 0, [])
    assert not table.dirty
    table.apply()
    assert calls == []
    for row in range(50):
        table.stage(row, row % 7, range(30))
    table.stage_rows(range(50), 8)
    table.apply()
    assert calls == ["copy", "kernel"]


def test_a_large_apply_grows_the_staging_buffer(device: torch.device) -> None:
    table = StagedTensor((4, 5000), torch.int64, device)
    for size in (10, 5000, 20):
        table.stage(1, 0, np.arange(size) + size)
        table.apply()
        assert table.tensor[1, :size].tolist() == list(range(size, 2 * size))


@pytest.mark.parametrize(
    ("rows", "starts", "lengths", "values"),
    [([3], [0], [1], [1]), ([-1], [0], [1], [1]), ([0], [2], [3], [1, 2, 3]), ([0], [0], [2], [1])],
    ids=["row past the end", "negative row", "run past the end", "lengths and values differ"],
)
def test_a_run_outside_the_tensor_is_our_own_fault(
    rows: list[int], starts: list[int], lengths: list[int], values: list[int]
) -> None:
    table = StagedTensor((3, 4), torch.int32, "cpu")
    with pytest.raises(AssertionError):
        table.stage_runs(rows, starts, lengths, values)
    assert not table.dirty


class _Event:
    """An event that is done when the test says so."""

    def __init__(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done

    def record(self) -> None:
        self.done = False


def _pool() -> PinnedPool:
    return PinnedPool(lambda size: PinnedBuffer(torch.empty(size, dtype=torch.uint8), _Event()))


def test_a_buffer_is_not_reused_before_its_event_is_done() -> None:
    """However many steps go by: nothing is retired by counting."""
    pool = _pool()
    busy = [pool.take(100) for _ in range(1)]
    busy[0].event.record()
    for _ in range(20):
        buffer = pool.take(100)
        assert all(buffer is not other for other in busy)
        buffer.event.record()
        busy.append(buffer)
    assert len(pool) == 21
    busy[7].event.done = True
    assert pool.take(100) is busy[7]
    assert len(pool) == 21


def test_a_retired_buffer_that_is_too_small_is_replaced() -> None:
    pool = _pool()
    pool.take(10)
    large = pool.take(1_000_000)
    assert large.data.numel() >= 1_000_000
    assert len(pool) == 1
    assert pool.take(5) is large


def test_copies_in_flight_keep_their_own_bytes(device: torch.device) -> None:
    """The array may change right after `copy` returns."""
    transfer = HostToDevice(device)
    array = np.zeros(3000, dtype=np.int32)
    outs = [torch.full((3002,), -1, dtype=torch.int32, device=device) for _ in range(8)]
    for value, out in enumerate(outs):
        array[:] = value
        transfer.copy(array.reshape(3, 1000), out)
    array[:] = 77
    assert [out[:3000].unique().tolist() for out in outs] == [[value] for value in range(8)]
    assert all(out[3000:].tolist() == [-1, -1] for out in outs)


def test_a_table_stays_in_device_memory_where_mapping_fails(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(host: torch.Tensor, mapped: torch.Tensor) -> None:
        raise RuntimeError("the device made a copy")

    monkeypatch.setattr(staged, "_check_mapping", broken)
    with caplog.at_level(logging.WARNING, "model_states.staged"):
        assert uva_tensor((3, 5), torch.int32, torch.device("cuda")) is None
    assert "table (3, 5) stays in device memory" in caplog.text
    table = StagedTensor((3, 5), torch.int32, device, uva=True)
    assert not table.is_uva
    table.stage(2, 1, [4])
    table.apply()
    assert table.tensor[2].tolist() == [0, 4, 0, 0, 0]


@pytest.mark.gpu
def test_a_mapped_table_is_host_memory_that_the_device_writes() -> None:
    table = StagedTensor((3, 5), torch.int32, "cuda", fill=9, uva=True)
    assert table.is_uva
    assert table.tensor.is_cuda
    before = torch.cuda.memory_allocated()
    large = StagedTensor((64, 1 << 18), torch.int32, "cuda", uva=True)
    assert large.is_uva
    # 64 MiB of table, and only the small staging buffer is device memory.
    assert torch.cuda.memory_allocated() - before < 1 << 20
    table.stage(1, 1, [1, 2])
    table.apply()
    table.tensor[0, 0] = 7
    assert table.tensor.tolist() == [[7, 9, 9, 9, 9], [9, 1, 2, 9, 9], [9] * 5]


@pytest.mark.gpu
def test_apply_does_not_wait_for_the_device() -> None:
    table = StagedTensor((8, 64), torch.int32, "cuda", uva=True)
    table.stage(0, 0, range(64))
    table.apply()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(50):
            table.stage(step % 8, step, [step])
            table.apply()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert table.tensor[1, 49].item() == 49
