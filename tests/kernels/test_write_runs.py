"""Runs of several tensors in one launch: the Triton kernel equals a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_states import staged_writer
from model_states.kernels.write_runs import write_runs
from model_states.staged import HostToDevice, StagedTensor
from model_states.staged_writer import StagedWriter

SHAPES = [((3, 7), torch.int32), ((5, 2600), torch.int32), ((40,), torch.float32), ((6, 5), torch.int32)]


@pytest.fixture(params=[False, True], ids=["by tensor", "by kernel"])
def by_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the writer's own kernel is used: compiled on a GPU, interpreted on a CPU."""
    monkeypatch.setattr(staged_writer, "use_triton", lambda tensor: request.param)
    return bool(request.param)


def _stage_some(rng: np.random.Generator, tensor: StagedTensor, expected: torch.Tensor) -> None:
    """Overlapping runs; the later one wins."""
    table = expected.view(expected.shape[0], -1)
    for _ in range(rng.integers(0, 4)):
        row, start = int(rng.integers(0, table.shape[0])), int(rng.integers(0, table.shape[1]))
        values = torch.from_numpy(rng.integers(-9, 2**20, rng.integers(0, table.shape[1] - start + 1)))
        tensor.stage(row, start, values.numpy())
        table[row, start : start + len(values)] = values.to(table.dtype)


@pytest.mark.parametrize("uva", [False, True])
def test_everything_is_written_and_nothing_else(device: torch.device, by_kernel: bool, uva: bool) -> None:
    rng, writer = np.random.default_rng(3), StagedWriter(device)
    tensors = [StagedTensor(shape, dtype, device, fill=-5, uva=uva, writer=writer) for shape, dtype in SHAPES]
    expected = [torch.full(shape, -5, dtype=dtype) for shape, dtype in SHAPES]
    for _ in range(25):
        for tensor, wanted in zip(tensors, expected, strict=True):
            _stage_some(rng, tensor, wanted)
            tensor.apply()
        writer.flush()
        assert writer.is_empty
        assert all(torch.equal(t.tensor.cpu(), wanted) for t, wanted in zip(tensors, expected, strict=True))


def test_a_tensor_waits_for_flush_and_one_that_comes_again_keeps_its_order(
    device: torch.device, by_kernel: bool
) -> None:
    writer = StagedWriter(device)
    first, second = (StagedTensor((4,), torch.int32, device, writer=writer) for _ in range(2))
    for value in (6, 7, 8):
        first.stage_rows([1, 2], value)
        first.apply()
        second.stage_rows([3], value)
        second.apply()
    assert second.tensor.tolist() == [0, 0, 0, 7]
    writer.flush()
    assert first.tensor.tolist() == [0, 8, 8, 0]
    assert second.tensor.tolist() == [0, 0, 0, 8]


def test_one_copy_and_one_launch_for_all(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    copy = HostToDevice.copy
    monkeypatch.setattr(staged_writer, "use_triton", lambda tensor: True)
    monkeypatch.setattr(
        staged_writer, "write_runs", lambda *args: (calls.append("kernel"), write_runs(*args))
    )
    monkeypatch.setattr(HostToDevice, "copy", lambda *args: (calls.append("copy"), copy(*args)))
    writer = StagedWriter(device)
    writer.flush()
    assert calls == []
    tensors = [StagedTensor((50, 300), torch.int32, device, writer=writer) for _ in range(3)]
    for tensor in tensors:
        for row in range(50):
            tensor.stage(row, row, np.arange(200))
        tensor.apply()
    writer.flush()
    assert calls == ["copy", "kernel"]
    assert all(torch.equal(tensor.tensor, tensors[0].tensor) for tensor in tensors)
    assert tensors[0].tensor[7].tolist() == [0] * 7 + list(range(200)) + [0] * 93
