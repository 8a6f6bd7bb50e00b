"""`group_maxima`: the Triton kernel against its torch twin, and both against exact sums."""

import pytest
import torch
from sampling_reference import make_rows

from core_runner.sampling.kernels import group_maxima as op
from core_runner.sampling.kernels.groups import PART, new_groups
from core_runner.sampling.kernels.noise import DRAFT, gumbel_torch
from core_runner.sampling_params import SamplingParams as Params

INF = float("inf")
OPTIONS = [
    Params(top_p=0.9),
    Params(temperature=0.3, top_p=0.5),
    Params(top_p=0.5, top_k=3),
    Params(temperature=0),
]
ALONE = [0, 1]  # rows that top-p alone filters


def run(kernel, logits, vocab_size, params, filters=True):
    rows = make_rows(params, [3] * len(params), logits.device, [0] * len(params))
    groups = new_groups(logits, vocab_size, filters)
    for tensor in groups:
        if tensor is not None:
            tensor.fill_(-77)
    kernel(logits, vocab_size, rows, DRAFT, groups)
    return groups


def both(logits, vocab_size, params=OPTIONS, alone=ALONE):
    expected = run(op.group_maxima_torch, logits, vocab_size, params)
    got = run(op.group_maxima_triton, logits, vocab_size, params)
    torch.testing.assert_close(got.maxima, expected.maxima, rtol=0, atol=0, equal_nan=True)
    noisy = [row for row, p in enumerate(params) if p.temperature > 0]
    close = {"rtol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(got.holder_scores[noisy], expected.holder_scores[noisy], atol=1e-6, **close)
    torch.testing.assert_close(got.holder_logits[noisy], expected.holder_logits[noisy], atol=0, **close)
    bounds, least = got.other_bounds[noisy], expected.other_bounds[noisy]
    room = torch.tensor([[0.12 * params[row].temperature] for row in noisy], device=logits.device)
    assert ((bounds >= least) | least.isnan()).all()
    torch.testing.assert_close(torch.minimum(bounds, least + room), bounds, atol=1e-5, **close)
    torch.testing.assert_close(got.sums[alone], expected.sums[alone], rtol=1e-5, atol=0, equal_nan=True)
    good = ~expected.maxima.isnan().any(dim=1)
    torch.testing.assert_close(got.parts[:, 0], expected.parts[:, 0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.parts[good, 1], expected.parts[good, 1], rtol=1e-5, atol=1e-6)
    assert torch.equal(got.parts.view(torch.int32)[good, 2], expected.parts.view(torch.int32)[good, 2])
    by_part = got.other_bounds.split(PART, dim=1)
    of_bounds = torch.stack([bounds.amax(dim=1) for bounds in by_part], dim=1)
    good_and_noisy = [row for row in noisy if good[row]]
    assert torch.equal(got.parts[good_and_noisy, 3], of_bounds[good_and_noisy])
    without = run(op.group_maxima_triton, logits, vocab_size, params, filters=False)
    assert without.maxima is None
    for one, other in zip(without[1:3], got[1:3], strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 1025, 64 * 65])
def test_twins_agree_with_exact_sums(device, vocab_size, dtype):
    storage = torch.full((4, 2, vocab_size + 5), float("nan"))
    storage[:, 0, :vocab_size] = 3 * torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0))
    storage[:, 0, vocab_size:] = 1e4
    logits = storage.to(dtype).to(device)[:, 0]
    got = both(logits, vocab_size)
    for row in ALONE:
        for group, x in enumerate(logits[row, :vocab_size].double().split(64)):
            assert float(got.maxima[row, group]) == x.max()
            total = ((x - x.max()) / OPTIONS[row].temperature).exp().sum()
            assert float(got.sums[row, group]) == pytest.approx(float(total), rel=1e-5)


def test_nan_and_infinities(device):
    logits = torch.zeros(2, 192, device=device)
    logits[0, 70] = float("nan")
    logits[1, :64], logits[1, 64:66], logits[1, 128:190] = -INF, INF, -INF
    got = both(logits, 192, [Params(top_p=0.5)] * 2, [1])
    assert got.maxima[:, :3].isnan().tolist() == [[False, True, False], [False] * 3]
    assert got.maxima[1, :3].tolist() == [-INF, INF, 0]
    assert got.sums[1, 1:3].tolist() == [2, 2]


@pytest.mark.parametrize("temperature", [1e-40, 1e30])
def test_extreme_temperatures(device, temperature):
    logits = torch.tensor([[-3e4, 5.0, 6e4, -INF, 6e4]], device=device)
    got = both(logits, 5, [Params(temperature=temperature, top_p=0.5)], [0])
    assert float(got.sums[0, 0]) == (4.0 if temperature > 1 else 2.0)


def test_parts_have_the_best_of_their_groups(device):
    vocab_size = 64 * (PART + 3) - 5
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)).to(device)
    logits[2:4] = logits[2:4].round()
    logits[4, torch.rand(vocab_size, generator=torch.Generator().manual_seed(2)) < 0.99] = -INF
    params = [Params(temperature=t) for t in (0.0, 1.0, 0.0, 1.0, 40.0)]
    got = both(logits, vocab_size, params, [])
    for row in range(5):
        for part, x in enumerate(logits[row].split(64 * PART)):
            groups = slice(part * PART, (part + 1) * PART)
            assert got.parts[row, 0, part] == x.max()
            token_id = int(got.parts.view(torch.int32)[row, 2, part])
            if params[row].temperature == 0:
                assert (got.parts[row, 1, part], token_id) == (x.max(), part * 64 * PART + int(x.argmax()))
                assert got.parts[row, 3, part] == -INF
            else:
                assert got.parts[row, 1, part] == got.holder_scores[row, groups].max()
                if got.parts[row, 1, part] > -INF:
                    assert got.holder_scores[row, token_id // 64] == got.parts[row, 1, part]
                assert got.parts[row, 3, part] == got.other_bounds[row, groups].max()


def test_holders_have_their_scores_and_other_ids_their_bound(device):
    """Against the noise of every id: the holder's score is exact, and no other id of the group is above the bound."""
    logits = 2 * torch.randn(4, 300, generator=torch.Generator().manual_seed(5)).to(device)
    params = [Params(temperature=t) for t in (0.1, 1.0, 30.0, 0.0)]
    rows = make_rows(params, [3] * 4, device, [0] * 4)
    got = run(op.group_maxima_triton, logits, 300, params)
    noise = gumbel_torch(rows.seed[rows.slots], rows.sampled_positions(), DRAFT, 300)
    scores = logits + rows.temperature[rows.slots, None] * noise
    for row in range(3):
        for group, (score, of_ids) in enumerate(
            zip(scores[row].split(64), noise[row].split(64), strict=True)
        ):
            order = of_ids.argsort(descending=True)
            if float(got.holder_scores[row, group]) > -INF:  # else it lies after the vocabulary
                assert float(got.holder_scores[row, group]) == pytest.approx(
                    float(score[order[0]]), rel=1e-5, abs=1e-5
                )
                score = score[order[1:]]
            assert float(got.other_bounds[row, group]) >= float(score.max())
    assert (got.holder_scores[:3, :4] > -INF).all()
