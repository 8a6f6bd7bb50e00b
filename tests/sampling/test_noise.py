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
def _bits_kernel(out, bits_out, seeds, positions, first_group, purpose: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    bits = noise.noise_bits(tl.load(seeds + row), tl.load(positions + row), first_group, purpose, GROUPS)
    bits = tl.reshape(bits, (GROUPS * 4,))
    at = row * GROUPS * 4 + tl.arange(0, GROUPS * 4)
    tl.store(bits_out + at, bits.to(tl.int64))
    tl.store(out + at, noise.gumbel_from_bits(bits))


@pytest.mark.parametrize("purpose", [noise.TARGET, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL])
@pytest.mark.parametrize("first_group", [0, 3])
def test_twins_are_bit_equal(device, purpose, first_group):
    seeds, positions = torch.tensor(SEEDS, device=device), torch.tensor(POSITIONS, device=device)
    bits = torch.full((len(SEEDS), 32), -1, device=device)
    values = torch.full((len(SEEDS), 32), math.nan, device=device)
    _bits_kernel[(len(SEEDS),)](values, bits, seeds, positions, first_group, purpose, GROUPS=8)
    first = 4 * first_group
    expected = noise.noise_bits_torch(seeds, positions, purpose, first + 32)
    torch.testing.assert_close(bits, expected[:, first:], rtol=0, atol=0)
    torch.testing.assert_close(values, noise.gumbel_from_bits_torch(bits), rtol=1e-5, atol=1e-6)


def test_layout_is_the_documented_one():
    got = noise.gumbel_torch(torch.tensor(SEEDS), torch.tensor(POSITIONS), noise.ACCEPT, 7)
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        for token_id in range(7):
            expected = gumbel(seed, position, token_id, noise.ACCEPT)
            assert float(got[row, token_id]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("word", "expected"),
    [(0, 33 * math.log(2)), (1, 32 * math.log(2)), (2**32 - 1, -math.log(24 * math.log(2)))],
)
def test_gumbel_is_finite_at_both_ends(device, word, expected):
    got = noise.gumbel_from_bits_torch(torch.tensor([word], device=device))
    assert float(got) == pytest.approx(expected, rel=1e-6)


def test_series_meets_the_logarithm():
    at = int(noise._SERIES_BELOW * 2**32)
    got = noise.gumbel_from_bits_torch(torch.tensor([at - 256, at, at + 256]))
    for value, word in zip(got.tolist(), (at - 256, at, at + 256), strict=True):
        assert value == pytest.approx(-math.log(-math.log1p(-word * 2.0**-32)), abs=2e-5)
    assert got[0] >= got[1] >= got[2]


def test_every_argument_changes_the_words():
    def draw(seed=3, position=9, purpose=noise.TARGET):
        return noise.noise_bits_torch(torch.tensor([seed]), torch.tensor([position]), purpose, 64)

    base = draw()
    assert base.unique().numel() == 64
    for other in (draw(seed=4), draw(seed=3 + 2**32), draw(position=10), draw(purpose=noise.RESIDUAL)):
        assert not (base == other).any()


def test_moments_of_gumbel():
    values = noise.gumbel_torch(torch.arange(100), torch.arange(100) * 7, noise.TARGET, 1000).double()
    # Mean is Euler's constant, variance pi^2 / 6; the bounds are about 4 standard errors of 100,000 draws.
    assert float(values.mean()) == pytest.approx(0.5772157, abs=0.016)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.045)
