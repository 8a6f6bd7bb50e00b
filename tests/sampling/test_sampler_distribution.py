"""Sampled frequencies against exact probabilities: chi-square with fixed seeds, limits of the 0.1 % tail."""

import pytest
import torch
from sampling_reference import kept_ids, make_batch, make_states

from core_runner.sampling.sampler import DefaultSampler
from core_runner.sampling_params import SamplingParams as Params

# Upper 0.1 % quantiles of chi-square by degrees of freedom.
LIMIT = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 9: 27.88}
LOGITS = [1.0, 0.3, -0.5, 2.0, 1.0, -1.2, 0.0, 1.7]
NUM_DRAWS = 20_000


def draw(params, positions, device, slots=None, logits=LOGITS):
    """One id for every position, of the request in slots[i]; params has one entry for each slot."""
    slots = [0] * len(positions) if slots is None else slots
    rows = torch.tensor(logits, device=device).expand(len(positions), -1)
    sampler = DefaultSampler(make_states(params, device), len(logits))
    return sampler.sample(rows, make_batch(slots, positions, device)).token_ids.cpu()


def exact_probabilities(params, logits=LOGITS):
    kept = kept_ids(logits, params)
    weights = torch.zeros(len(logits), dtype=torch.float64)
    weights[kept] = (torch.tensor(logits, dtype=torch.float64)[kept] / params.temperature).exp()
    return weights / weights.sum()


def check(counts, probabilities):
    """Nothing outside the support, and a chi-square below its limit inside."""
    support = probabilities > 0
    assert int(counts[~support].sum()) == 0
    expected = probabilities[support] * counts.sum()
    assert float(expected.min()) > 5
    chi_square = float(((counts[support] - expected) ** 2 / expected).sum())
    assert chi_square < LIMIT[int(support.sum()) - 1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.7, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_positions_of_one_request(device, options):
    params = Params(seed=20240607, **options)
    ids = draw([params], range(1, NUM_DRAWS + 1), device)
    check(torch.bincount(ids, minlength=len(LOGITS)), exact_probabilities(params))


@pytest.mark.parametrize("first_seed", [0, -3000, 2**63 - 6001])
def test_one_position_of_requests_with_neighbouring_seeds(device, first_seed):
    params = [Params(seed=first_seed + i, temperature=0.9) for i in range(6000)]
    ids = draw(params, [2**16 + 3] * 6000, device, slots=range(6000))
    check(torch.bincount(ids, minlength=len(LOGITS)), exact_probabilities(params[0]))


def test_neighbouring_positions_are_independent(device):
    ids = draw([Params(seed=5)], range(NUM_DRAWS), device, logits=[0.0, 0.5, 1.0, 0.2])
    single = exact_probabilities(Params(), logits=[0.0, 0.5, 1.0, 0.2])
    pairs = torch.bincount(4 * ids[0::2] + ids[1::2], minlength=16)
    expected = (single[:, None] * single).flatten() * pairs.sum()
    # 16 cells with known probabilities have 15 degrees of freedom.
    assert float(((pairs - expected) ** 2 / expected).sum()) < 37.70


def test_a_large_vocabulary_with_a_rare_tail(device):
    """Mass of many rare ids together: coarse noise would lose it."""
    logits = [0.0] + [-9.0] * 2047
    ids = draw([Params(seed=11)], range(2000), device, logits=logits)
    probability = exact_probabilities(Params(), logits=logits)[0]
    counts = torch.tensor([int((ids == 0).sum()), int((ids > 0).sum())])
    check(counts, torch.stack([probability, 1 - probability]))
