"""The noise: Philox against the published vectors, twins bit for bit, a finite Gumbel with both tails."""

import math

import pytest
import torch
from sampling_reference import gumbel, philox

from core_runner.sampling.kernels import noise
from model_states.kernels.triton_import import tl, triton

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = [0, 1, -1, 42, 2**63 - 1, -(2**63), -123456789012345, 2**32]
POSITIONS = [0, 1, 7, 2**16, 2**16 + 1, 2**20 + 3, 2**31 - 1, 5]


def words(text):
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, result):
    tensors = [torch.tensor([w]) for w in words(counter) + words(key)]
    got = noise.philox_torch(tuple(tensors[4:]), tuple(tensors[:4]))
    assert tuple(int(w) for w in got) == words(result)
    assert philox(words(key), words(counter)) == words(result)


@triton.jit
def _noise_kernel(
    out, most_out, least_out, seeds, positions, first, purpose: tl.constexpr, NUM: tl.constexpr
):
    row = tl.program_id(0)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    groups = first + tl.arange(0, NUM)
    at = row * NUM + tl.arange(0, NUM)
    least, gap, holder = noise.group_noise(seed, position, groups, purpose)
    words = noise.id_words(seed, position, groups, purpose, NUM)
    least_other = noise.least_of_others(words, holder)
    other = noise.gumbel_of_other(words, least[:, None], gap[:, None], least_other[:, None])
    lane = tl.arange(0, 64)[None, :]
    noises = tl.where(lane == holder[:, None], -tl.log(least)[:, None], other)
    tl.store(out + at[:, None] * 64 + lane, noises)
    most = noise.most_gumbel_of_other(words, least[:, None], gap[:, None], least_other[:, None])
    tl.store(most_out + at[:, None] * 64 + lane, most)
    tl.store(least_out + 3 * at, least)
    tl.store(least_out + 3 * at + 1, gap)
    tl.store(least_out + 3 * at + 2, holder.to(tl.float32))


@pytest.mark.parametrize("purpose", [noise.TARGET, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL])
@pytest.mark.parametrize("first", [0, 3])
def test_twins_agree(device, purpose, first):
    seeds, positions = torch.tensor(SEEDS, device=device), torch.tensor(POSITIONS, device=device)
    values = torch.full((len(SEEDS), 4, 64), math.nan, device=device)
    parts = torch.full((len(SEEDS), 4, 3), math.nan, device=device)
    bounds = torch.full_like(values, math.nan)
    _noise_kernel[(len(SEEDS),)](values, bounds, parts, seeds, positions, first, purpose, NUM=4)
    groups = slice(first, first + 4)
    expected = noise.gumbel_torch(seeds, positions, purpose, 8 * 64).unflatten(1, (8, 64))[:, groups]
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    of_groups = torch.stack(noise.group_noise_torch(seeds, positions, purpose, 8), dim=2)[:, groups]
    torch.testing.assert_close(parts, of_groups.float(), rtol=1e-5, atol=0)
    is_other = torch.arange(64, device=device) != parts[:, :, 2:]
    assert (bounds >= values)[is_other].all()
    assert (bounds <= values + 0.2)[is_other].all()
    # The holder has the largest noise, and the next one is `gap` below.
    largest = expected.topk(2, dim=2)
    assert torch.equal(largest.indices[:, :, 0], of_groups[:, :, 2].long())
    torch.testing.assert_close(largest.values[:, :, 0], -of_groups[:, :, 0].log().float())
    torch.testing.assert_close(largest.values[:, :, 1], -of_groups[:, :, :2].sum(dim=2).log().float())


def test_layout_is_the_documented_one():
    got = noise.gumbel_torch(torch.tensor(SEEDS), torch.tensor(POSITIONS), noise.ACCEPT, 401)
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        for token_id in (*range(7), *range(60, 70), 400):
            expected = gumbel(seed, position, token_id, noise.ACCEPT)
            assert float(got[row, token_id]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("word", "expected"),
    [(0, 2.0**-33), (1, 2.0**-32), (2**31, math.log(2)), (2**32 - 1, 24 * math.log(2))],
)
def test_exponential_is_positive_and_finite_at_both_ends(device, word, expected):
    got = noise.exponential_torch(torch.tensor([word], device=device))
    assert float(got) == pytest.approx(expected, rel=1e-6)


def test_no_noise_is_less_than_the_least():
    """By the formula, from the largest e that there is, with room to spare."""
    largest = float(noise.exponential_torch(torch.tensor([2**32 - 1])))
    least = -math.log(largest / 64 + largest / 63 + largest)
    assert noise.LEAST_GUMBEL + 0.05 < least < noise.LEAST_GUMBEL + 0.06


def test_series_meets_the_logarithm():
    at = int(noise._SERIES_BELOW * 2**32)
    got = noise.exponential_torch(torch.tensor([at - 256, at, at + 256]))
    for value, word in zip(got.tolist(), (at - 256, at, at + 256), strict=True):
        assert value == pytest.approx(-math.log1p(-word * 2.0**-32), rel=2e-5)
    assert got[0] <= got[1] <= got[2]


def test_every_argument_changes_the_words():
    def draw(seed=3, position=9, purpose=noise.TARGET, first=0):
        return noise.noise_words_torch(torch.tensor([seed]), torch.tensor([position]), purpose, first, 16)

    base = draw()
    assert base.unique().numel() == 64
    others = draw(seed=4), draw(seed=3 + 2**32), draw(position=10), draw(purpose=noise.RESIDUAL)
    for other in (*others, draw(first=2**31)):
        assert not (base == other).any()


def test_vocabulary_does_not_change_the_noise():
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    large = noise.gumbel_torch(seeds, positions, noise.TARGET, 1000)
    for vocab_size in (1, 63, 64, 65, 257):
        small = noise.gumbel_torch(seeds, positions, noise.TARGET, vocab_size)
        assert torch.equal(small, large[:, :vocab_size])


def chi_square_limit(degrees):
    """Upper 0.1 % quantile, by Wilson and Hilferty's approximation."""
    return degrees * (1 - 2 / (9 * degrees) + 3.0902 * math.sqrt(2 / (9 * degrees))) ** 3


def check_independent(one, other, cells=24):
    """Chi-square of the pairs of two samples' probabilities, in cells x cells equal parts of the unit square."""
    places = (one * cells).long().clamp(max=cells - 1) * cells + (other * cells).long().clamp(max=cells - 1)
    counts = torch.bincount(places.flatten(), minlength=cells * cells).double()
    mean = counts.sum() / cells**2
    assert mean > 20
    assert float(((counts - mean) ** 2 / mean).sum()) < chi_square_limit(cells**2 - 1)


def probabilities(seeds, positions, num_ids=640):
    """The noise as what is uniform on [0, 1] if it is Gumbel's."""
    values = noise.gumbel_torch(torch.as_tensor(seeds), torch.as_tensor(positions), noise.TARGET, num_ids)
    return torch.exp(-torch.exp(-values.double()))


@pytest.mark.parametrize("apart", [1, 2, 4, 32, 63, 64, 256])
def test_noise_of_two_ids_is_independent(apart):
    """Within four ids of a draw, within a group of 64, in neighbouring groups, in the same place of a later draw."""
    u = probabilities(torch.arange(40), torch.arange(40) * 3 + 1)
    check_independent(u[:, :-apart], u[:, apart:])


@pytest.mark.parametrize("other", [1, 2**31, 2**32, -(2**63)])
def test_noise_of_seeds_that_differ_in_one_bit_is_independent(other):
    seeds = torch.arange(40) * 2
    positions = torch.full((40,), 17)
    check_independent(probabilities(seeds, positions), probabilities(seeds ^ other, positions))


@pytest.mark.parametrize("apart", [1, 2, 2**10, 2**20])
def test_noise_of_two_positions_is_independent(apart):
    seeds, positions = torch.full((40,), 5), torch.arange(40) * 7
    check_independent(probabilities(seeds, positions), probabilities(seeds, positions + apart))


def test_largest_of_a_group_is_in_every_place_and_independent_of_the_others():
    u = probabilities(torch.arange(500), torch.arange(500) * 7).unflatten(1, (-1, 64))
    places = torch.bincount(u.argmax(dim=2).flatten(), minlength=64).double()
    assert float(((places - places.mean()) ** 2 / places.mean()).sum()) < chi_square_limit(63)
    # The largest of 64 to the 64th power is uniform, and so is how far the second is below it.
    top = u.topk(2, dim=2).values
    check_independent(top[..., 0] ** 64, (top[..., 1] / top[..., 0]) ** 63, cells=12)


@pytest.mark.parametrize("few", [1, 64, 200])
def test_rare_values_come_as_often_as_they_should(few):
    """Counts in the tail that decides: values that one id in 2,000 has, over many draws."""
    u = probabilities(torch.arange(400), torch.arange(400) * 11, num_ids=few * 5)
    expected = u.numel() / 2000
    assert abs(int((u > 1 - 1 / 2000).sum()) - expected) < 4 * math.sqrt(expected) + 1


def test_moments_of_gumbel():
    values = noise.gumbel_torch(torch.arange(100), torch.arange(100) * 7, noise.TARGET, 1000).double()
    # Mean is Euler's constant, variance pi^2 / 6; the bounds are about 4 standard errors of 100,000 draws.
    assert float(values.mean()) == pytest.approx(0.5772157, abs=0.016)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.045)
