"""`best_ids`: the Triton kernel against its torch twin, with ties, masked ids and more than a group holds."""

import pytest
import torch
from sampling_reference import make_rows

from core_runner.sampling.kernels import best_ids as op
from core_runner.sampling.kernels.group_maxima import group_maxima_torch
from core_runner.sampling.kernels.groups import new_groups
from core_runner.sampling_params import SamplingParams as Params

INF = float("inf")


def both(logits, vocab_size, count):
    groups = new_groups(logits, vocab_size, filters=False, maxima=True)
    rows = make_rows([Params()] * len(logits), [1] * len(logits), logits.device, [0] * len(logits))
    group_maxima_torch(logits, vocab_size, rows, 0, groups)
    storage = torch.full((2, len(logits), count + 1), -77, dtype=torch.int32, device=logits.device)
    op.best_ids_torch(logits, vocab_size, storage[0, :, 1:])
    op.best_ids_triton(logits, vocab_size, groups.maxima, storage[1, :, 1:])
    assert torch.equal(storage[0], storage[1])
    assert (storage[:, :, 0] == -77).all()
    return storage[0, :, 1:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "count"), [(1, 1), (31, 31), (300, 5), (1025, 70)])
def test_twins_agree(device, vocab_size, count, dtype):
    storage = torch.full((3, 2, vocab_size + 5), float("nan"))
    storage[:, 0, :vocab_size] = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(2))
    storage[:, 0, vocab_size:] = 1e4
    logits = storage.to(dtype).to(device)[:, 0]
    got = both(logits, vocab_size, count)
    best = logits[:, :vocab_size].float().topk(count, dim=1).values
    assert torch.equal(logits.float().gather(1, torch.tensor(got, device=device)), best)


def test_ties_come_by_id(device):
    logits = torch.full((2, 200), -2.0, device=device)
    logits[0, [190, 66, 3, 70]] = 1.5
    logits[1] = 0.0
    logits[1, ::2] = -0.0
    got = both(logits, 200, 7)
    assert got == [[3, 66, 70, 190, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]


def test_masked_ids_come_last(device):
    logits = torch.full((1, 130), -INF, device=device)
    logits[0, [129, 2]] = torch.tensor([INF, -1e30], device=device)
    assert both(logits, 130, 130)[0] == [129, 2, 0, 1, *range(3, 129)]
