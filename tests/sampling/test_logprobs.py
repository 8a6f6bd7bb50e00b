"""`logprobs`: the Triton kernel against its torch twin and against torch's own log-softmax."""

import pytest
import torch

from core_runner.sampling.kernels import logprobs as op

INF = float("inf")


def run(kernel, logits, vocab_size, ids):
    values = torch.full(ids.shape, float("nan"), device=logits.device)
    ranks = torch.full(ids.shape[:1], -9, dtype=torch.int32, device=logits.device)
    kernel(logits, vocab_size, ids, values, ranks)
    return values, ranks


def both(logits, vocab_size, ids):
    expected = run(op.logprobs_torch, logits, vocab_size, ids)
    got = run(op.logprobs_triton, logits, vocab_size, ids)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1], expected[1])
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "num_ids"), [(1, 1), (31, 3), (1000, 1), (1025, 6)])
def test_twins_agree_with_log_softmax(device, vocab_size, num_ids, dtype):
    generator = torch.Generator().manual_seed(1)
    storage = torch.full((5, 2, vocab_size + 3), float("nan"))
    storage[:, 0, :vocab_size] = 4 * torch.randn(5, vocab_size, generator=generator)
    logits = storage.to(dtype).to(device)[:, 0]
    ids = torch.randint(vocab_size, (5, num_ids), generator=generator, dtype=torch.int32).to(device)
    values, ranks = both(logits, vocab_size, ids)
    exact = logits[:, :vocab_size].double().log_softmax(dim=1).gather(1, ids.long())
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-5)
    own = logits.gather(1, ids[:, :1].long())
    assert torch.equal(ranks, ((logits[:, :vocab_size] > own).sum(dim=1) + 1).int())


def test_rank_of_ties_is_the_best_of_them(device):
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 5.0]], device=device)
    for token_id, rank in ((4, 1), (1, 2), (3, 2), (0, 5)):
        ids = torch.tensor([[token_id]], dtype=torch.int32, device=device)
        assert both(logits, 5, ids)[1].tolist() == [rank]


@pytest.mark.parametrize("peak", [6e4, -6e4])
def test_far_logits_stay_finite(device, peak):
    logits = torch.full((1, 1025), peak, device=device)
    logits[0, 7] = peak + 1
    ids = torch.tensor([[7, 8]], dtype=torch.int32, device=device)
    values, _ = both(logits, 1025, ids)
    assert torch.isfinite(values).all()


def test_infinite_logits_give_no_nan(device):
    logits = torch.tensor(
        [[-INF, 0.0, 1.0], [INF, 0.0, INF], [-INF, -INF, -INF], [-INF, 2.0, -INF]], device=device
    )
    ids = torch.tensor([[0, 2], [0, 1], [1, 2], [1, 0]], dtype=torch.int32, device=device)
    values, ranks = both(logits, 3, ids)
    assert not values.isnan().any()
    half = -torch.tensor(2.0).log().item()
    assert values[0, 0] == -INF
    assert values[1].tolist() == [pytest.approx(half), -INF]
    assert values[3].tolist() == [0.0, -INF]
    assert ranks.tolist() == [3, 1, 1, 1]
