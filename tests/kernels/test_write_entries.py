"""`write_entries`: Triton equals the torch twin, and the twin writes each input to its entry."""

from __future__ import annotations

import torch

from model_states.kernels.write_entries import write_entries_torch, write_entries_triton

POISON = 7777.0


def test_kernel_and_twin(device):
    torch.manual_seed(0)
    both = torch.randn(2, 37, 2, 3, 12, device=device)
    entries = torch.tensor([3, 1], device=device)
    pools = [torch.full((5, 3, 40, 12), POISON, device=device) for _ in range(2)]
    for half in range(2):
        x = both[:, :, half]
        write_entries_torch(pools[0], entries, x)
        write_entries_triton(pools[1], entries, x)
        assert torch.equal(*pools)
        for i, entry in enumerate((3, 1)):
            assert torch.equal(pools[0][entry, :, :37], x[i].transpose(0, 1))
    untouched = [pools[0][[0, 2, 4]], pools[0][:, :, 37:]]
    assert all((part == POISON).all() for part in untouched)
