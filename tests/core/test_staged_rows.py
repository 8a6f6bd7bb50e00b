"""Rows on their way to a device: some through pinned memory of ours, some read where they lie."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model_states import staged_rows
from model_states.staged import PinnedBuffer, PinnedPool
from model_states.staged_rows import RowsToDevice, host_array


class FakeEvent:
    """Done when the test says so."""

    all_done = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return FakeEvent.all_done


class Pinned(np.ndarray):
    """Stands for an array in pinned memory."""


def pinned(values: np.ndarray) -> np.ndarray:
    return values.view(Pinned)


@pytest.fixture
def rows(monkeypatch):
    """As for a GPU, whose memory is the host's."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(staged_rows, "_is_pinned", lambda array: isinstance(array, Pinned))
    FakeEvent.all_done = True
    rows = RowsToDevice("cpu")
    rows._device = SimpleNamespace(type="cuda")
    rows._pool = PinnedPool(lambda size: PinnedBuffer(torch.empty(size, dtype=torch.uint8), FakeEvent()))
    return rows


@pytest.mark.parametrize("are_pinned", [(0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1)])
def test_every_row_gets_its_array_and_zeros_behind_it(rows, are_pinned):
    arrays = [np.arange(1, length + 1, dtype=np.float32) for length in (5, 3, 4)]
    given = [pinned(array) if own else array for array, own in zip(arrays, are_pinned, strict=True)]
    out = torch.full((3, 5), torch.nan)
    rows.copy_rows(given, out)
    expected = np.zeros((3, 5), np.float32)
    for row, array in zip(expected, arrays, strict=True):
        row[: len(array)] = array
    np.testing.assert_array_equal(out.numpy(), expected)


def test_what_the_device_reads_in_place_lives_until_it_has(rows):
    array, out = pinned(np.ones(4, np.float32)), torch.empty(1, 4)
    gone = weakref.ref(array)
    FakeEvent.all_done = False
    rows.copy_rows([array], out)
    del array
    rows.copy_rows([np.ones(4, np.float32)], out)
    gc.collect()
    assert gone() is not None
    FakeEvent.all_done = True
    rows.copy_rows([np.ones(4, np.float32)], out)
    gc.collect()
    assert gone() is None


def test_arrays_of_a_processor_are_ordinary():
    array = host_array((3, 2), torch.device("cpu"))
    assert (array.shape, array.dtype, array.base) == ((3, 2), np.float32, None)
