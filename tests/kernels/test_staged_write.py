"""The staged write: Triton equals the torch twin and a loop."""

from __future__ import annotations

import pytest
import torch

from model_states.kernels.staged_write import staged_write_torch, staged_write_triton


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize(
    ("num_rows", "num_cols", "runs"),
    [
        (3, 1, [(2, 0, 1), (0, 0, 1)]),
        (5, 7, [(4, 0, 7), (0, 3, 1), (2, 2, 4), (0, 4, 3), (1, 1, 0)]),
        (2, 2600, [(1, 3, 2590), (0, 0, 5)]),
    ],
    ids=["one column", "many runs", "longer than a program's block"],
)
def test_runs_are_written_and_nothing_else(
    device: torch.device, dtype: torch.dtype, num_rows: int, num_cols: int, runs: list[tuple[int, int, int]]
) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = [length for _, _, length in runs]
    values = torch.randint(0, 2**20, (sum(lengths),), generator=generator).to(dtype).to(device)
    target = torch.randint(0, 2**20, (num_rows, num_cols), generator=generator).to(dtype).to(device)
    expected, first = target.clone(), 0
    for row, start, length in runs:
        expected[row, start : start + length] = values[first : first + length]
        first += length
    packed = (
        [run[0] for run in runs] + [run[1] for run in runs] + torch.tensor([0, *lengths]).cumsum(0).tolist()
    )
    packed_runs = torch.tensor(packed, dtype=torch.int32, device=device)
    by_torch, by_triton = target.clone(), target.clone()
    staged_write_torch(by_torch, packed_runs, values)
    staged_write_triton(by_triton, packed_runs, values, max(lengths))
    assert torch.equal(by_torch, expected)
    assert torch.equal(by_triton, expected)
