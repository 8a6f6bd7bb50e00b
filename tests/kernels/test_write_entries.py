"""`write_entries`: Triton equals the torch twin, and the twin writes each input to its entry."""

from __future__ import annotations

import pytest
import torch

from model_states.kernels.write_entries import Entries, write_entries_torch, write_entries_triton

POISON = 77


@pytest.mark.parametrize("is_int8", [False, True], ids=["as they are", "int8"])
def test_kernel_and_twin(is_int8, device):
    torch.manual_seed(0)
    both = torch.randn(2, 37, 2, 3, 12, device=device)
    both[0, :, :, 1, 5], both[1, 29:] = 0.0, torch.nan
    places = torch.tensor([[3, 1], [37, 29]], device=device)
    dtype = torch.int8 if is_int8 else torch.float32
    pools = [
        Entries(
            torch.full((5, 3, 40, 12), POISON, dtype=dtype, device=device),
            torch.full((5, 3, 12), float(POISON), device=device) if is_int8 else None,
        )
        for _ in range(2)
    ]
    for half in range(2):
        x = both[:, :, half]
        write_entries_torch(pools[0], *places, x)
        write_entries_triton(pools[1], *places, x)
        torch.testing.assert_close(pools[0].values, pools[1].values, rtol=0, atol=int(is_int8))
        for i, (entry, length) in enumerate(places.T.tolist()):
            wanted, read = x[i, :length].transpose(0, 1), pools[1].read(entry)[:, :length]
            bound = wanted.abs().amax(-2, keepdim=True) / 254.0 * 1.001 if is_int8 else 0.0
            assert ((read - wanted).abs() <= bound).all()
        if is_int8:
            torch.testing.assert_close(pools[0].scales, pools[1].scales)
            assert pools[1].values[[3, 1], :, :29].abs().amax() == 127
    untouched = [pools[1].values[[0, 2, 4]], pools[1].values[3, :, 37:], pools[1].values[1, :, 29:]]
    assert all((part == POISON).all() for part in untouched)


def test_what_is_no_number_is_none_when_it_is_read(device):
    x = torch.ones(1, 8, 2, 16, device=device)
    x[0, 3, 1, 7], x[0, 5, 0, 2] = torch.nan, torch.inf
    pool = Entries(
        torch.zeros(1, 2, 8, 16, dtype=torch.int8, device=device), torch.zeros(1, 2, 16, device=device)
    )
    write_entries_triton(pool, *torch.tensor([[0], [8]], device=device), x)
    assert not pool.read(0)[1, :, 7].isfinite().any()
    assert not pool.read(0)[0, :, 2].isfinite().any()
    assert pool.read(0).isfinite().sum() == 8 * 30
