"""`nucleus`: sampling under top-p without its threshold against sampling with it."""

import pytest
import torch
from sampling_reference import GARBAGE, make_rows

from core_runner.sampling.kernels import nucleus as op
from core_runner.sampling.kernels.group_maxima import group_maxima_torch
from core_runner.sampling.kernels.groups import new_groups
from core_runner.sampling.kernels.gumbel_argmax import gumbel_argmax_torch
from core_runner.sampling.kernels.ladder import new_ladder
from core_runner.sampling.kernels.noise import TARGET
from core_runner.sampling_params import SamplingParams as Params

INF = float("inf")


def both(logits, vocab_size, params, first_position=1):
    """Ids of both twins, after the kernels that come before were done in torch."""
    n, device = len(params), logits.device
    rows = make_rows(params, [first_position + 3 * i for i in range(n)], device, list(range(n)))
    groups = new_groups(logits, vocab_size, filters=True)
    group_maxima_torch(logits, vocab_size, rows, TARGET, groups)
    ids = torch.full((n,), GARBAGE, device=device)
    failed = torch.ones(n, dtype=torch.bool, device=device)
    ladder = new_ladder(n, device)
    gumbel_argmax_torch(logits, vocab_size, rows, TARGET, ids, failed, ladder)
    expected, got = ids.clone(), ids.clone()
    op.nucleus_torch(logits, vocab_size, rows, TARGET, expected)
    masses = torch.full((n, 3, groups.parts.shape[2]), float("nan"), device=device)
    chosen = torch.full_like(groups.other_bounds, GARBAGE, dtype=torch.int32)
    op.nucleus_triton(logits, vocab_size, rows, TARGET, groups, ladder, got, masses, chosen)
    assert torch.equal(got, expected)
    return ids, got, ladder


def logits_of(scale, num_rows, vocab_size, dtype, device):
    """Strided rows between rows of NaN; the padding columns would be the largest."""
    storage = torch.full((num_rows, 2, vocab_size + 5), float("nan"))
    noise = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    storage[:, 0, :vocab_size] = scale * noise
    storage[:, 0, vocab_size:] = 1e4
    return storage.to(dtype).to(device)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 700])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_twins_agree(device, vocab_size, dtype, scale):
    params = [Params(top_p=p, temperature=t) for t in (0.5, 1.5) for p in (0.95, 0.5, 0.1)]
    both(logits_of(scale, 6, vocab_size, dtype, device), vocab_size, params)


def test_ladders_that_end_too_early_go_on(device):
    """Of a flat row little is left under a small top-p: three rungs are seldom enough."""
    params = [Params(top_p=0.01, temperature=2.0)] * 8
    ids, got, ladder = both(logits_of(1.0, 8, 700, torch.float32, device), 700, params)
    beyond = (got[:, None] != ladder.ids).all(dim=1)
    assert int(beyond.sum()) > 1
    assert (ids != got).any()


def test_other_rows_keep_their_ids(device):
    params = [
        Params(top_p=0.01),
        Params(top_p=0.01, top_k=300),
        Params(top_k=300),
        Params(temperature=0),
        Params(),
        Params(top_p=0.01, top_k=400),  # top-k keeps all, so top-p is alone
    ]
    ids, got, _ = both(logits_of(0.1, 6, 400, torch.float32, device), 400, params)
    assert torch.equal(ids[1:5], got[1:5])
    assert (ids != got)[[0, 5]].all()


def test_min_p_holds_beside_top_p(device):
    logits = logits_of(1.0, 8, 400, torch.float32, device)
    params = [Params(top_p=0.8, min_p=0.3, temperature=2.0)] * 8
    _, got, _ = both(logits, 400, params)
    chosen = logits.gather(1, got[:, None])[:, 0]
    assert (chosen >= logits[:, :400].amax(dim=1) + 2 * torch.tensor(0.3).log()).all()


def test_ties_at_the_edge_are_in(device):
    """The mass above an id decides, not the mass with it: equal logits are in or out together."""
    logits = torch.tensor([2.0] * 3 + [1.0] * 200 + [-9.0] * 50, device=device).repeat(12, 1)
    _, got, _ = both(logits, 253, [Params(top_p=0.1)] * 12)
    assert int((got >= 3).sum()) > 3
    assert (got < 203).all()


@pytest.mark.parametrize("top_p", [1e-6, 1e-45, 1e-60])
def test_the_best_id_is_in_the_smallest_nucleus(device, top_p):
    logits = logits_of(0.1, 4, 200, torch.float32, device)
    _, got, _ = both(logits, 200, [Params(top_p=top_p)] * 4)
    assert torch.equal(got, logits[:, :200].argmax(dim=1))


@pytest.mark.parametrize("temperature", [1e-40, 1e-7, 1e30])
def test_extreme_temperatures(device, temperature):
    logits = torch.tensor([-3e4, 5.0, 6e4, -INF, 0.0], device=device).repeat(6, 1)
    _, got, _ = both(logits, 5, [Params(temperature=temperature, top_p=0.5)] * 6)
    assert set(got.tolist()) == ({1, 2} if temperature > 1 else {2})


def test_bad_rows_harm_no_other(device):
    logits = logits_of(0.5, 5, 300, torch.float32, device).clone()
    params = [Params(top_p=0.3)] * 5
    _, before, _ = both(logits, 300, params)
    logits[0, 299], logits[1, :300], logits[2, [7, 200]] = float("nan"), -INF, INF
    _, after, _ = both(logits, 300, params)
    assert after[:2].tolist() == [0, 0]
    assert int(after[2]) in (7, 200)
    assert torch.equal(after[3:], before[3:])
