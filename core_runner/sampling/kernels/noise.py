"""Sampling noise: a pure function of (seed, position, token id, purpose) and of a version number.

    words(i)    = philox4x32_10(key = seed, counter = (i, position, purpose, NOISE_VERSION))
    e[id]       = exponential(words(id // 4)[id % 4])
    least[g]    = exponential(words(2^31 + g // 4)[g % 4]) / 64            g = id // 64, a group of 64 ids
    gumbel[id]  = -log(e[id] - (smallest e of the group) + least[g])       finite, in [-2.82, 27.05]

    exponential(word) = -log(1 - v),   v = clamp(float(word), 0.5) * 2^-32, at most 1 - 2^-24

That is independent Gumbel noise: the smallest of 64 exponentials is exponential with 64 times the rate, and nothing
that the others have above it depends on it, so another draw may stand in its place. What it buys: the largest noise
of a group, `-log(least[g])`, is known without drawing any of its ids'. One draw for every 64 ids bounds the scores of a
row, and the 64 words of a group are drawn only where its bound reaches the best score.

The tail that decides an argmax is a small `least`, where a float32 is finest; so the stream resolves probabilities
down to 2^-32. Whatever changes a stream (layout, rounds, conversion) must raise `NOISE_VERSION`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from model_states.kernels.triton_import import tl, triton

NOISE_VERSION = 2
GROUP = 64  # ids of a group

# What a draw is for. Two decisions at one position never share a number.
TARGET = 0
DRAFT = 1
ACCEPT = 2
RESIDUAL = 3

_ROUNDS = 10
_MASK = 0xFFFFFFFF
_GROUPS_FROM = 1 << 31  # counter of the first groups, where no id's is
_SERIES_BELOW = 2.0**-8  # below this, -log(1 - v) by its series: 1 - v would round the low bits of v away
_VERSION, _FROM = tl.constexpr(NOISE_VERSION), tl.constexpr(_GROUPS_FROM)
_SERIES = tl.constexpr(_SERIES_BELOW)
_SIZE = tl.constexpr(GROUP)
# log(2) * 2^-23, and log(2) * (127 + 32) + log(GROUP): what makes -log(v / GROUP) of the bits of a float32.
_SLOPE, _OFFSET = tl.constexpr(8.262958294867817e-08), tl.constexpr(math.log(2) * 159 + math.log(GROUP))


def philox_torch(
    key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Philox 4x32-10 of Random123: four words for every counter.

    key: two, and counter: four int64 tensors that hold uint32 values and broadcast together. Returns four
    int64 tensors that hold uint32 values. int64 products wrap, which leaves their 64 bits right.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK
        c2, c3 = ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def noise_words_torch(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int, first: int, count: int
) -> torch.Tensor:
    """Words of `count` counters from `first` on for each row: seeds, positions int64 [n] -> [n, 4 * count].

    int64 that holds uint32 values.
    """
    index = torch.arange(first, first + count, device=seeds.device)[None, :]
    seed, position = seeds.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    fixed = torch.zeros_like(position)
    counter = (
        index + fixed,
        (position & _MASK) + torch.zeros_like(index),
        fixed + purpose,
        fixed + NOISE_VERSION,
    )
    words = philox_torch((seed & _MASK, (seed >> 32) & _MASK), counter)
    return torch.stack(words, dim=-1).flatten(1)


def exponential_torch(words: torch.Tensor) -> torch.Tensor:
    """Standard exponential noise, float32, from words as `noise_words_torch` gives them."""
    v = (words.to(torch.float32).clamp(min=0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return torch.where(v < _SERIES_BELOW, series, -torch.log(1.0 - v))


def gumbel_torch(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, num_ids: int) -> torch.Tensor:
    """Gumbel noise of every id: seeds and positions int64 [n] -> float32 [n, num_ids]."""
    # Whole groups, whatever the vocabulary, so that an id's noise does not depend on its size.
    num_groups = -(-num_ids // GROUP)
    e = exponential_torch(noise_words_torch(seeds, positions, purpose, 0, num_groups * GROUP // 4))
    e = e.unflatten(1, (num_groups, GROUP))
    words = noise_words_torch(seeds, positions, purpose, _GROUPS_FROM, -(-num_groups // 4))[:, :num_groups]
    least = exponential_torch(words) / GROUP
    e = e - e.amin(dim=2, keepdim=True) + least[:, :, None]
    return -torch.log(e).flatten(1)[:, :num_ids]


@triton.jit
def _wide_product(word, factor) -> Any:
    """High and low 32 bits of a product of uint32: one multiplication where a product of each half takes two."""
    product = word.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def noise_words(seed, position, index, purpose: tl.constexpr) -> Any:
    """The four words of each counter: four uint32 tensors of the shape of `index`, uint32."""
    c0, c1 = index, position.to(tl.uint32)
    c2, c3 = tl.full((), purpose, tl.uint32), tl.full((), _VERSION, tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a_high, a_low = _wide_product(c0, 0xD2511F53)
        b_high, b_low = _wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = b_high ^ c1 ^ k0, b_low, a_high ^ c3 ^ k1, a_low
        k0 = tl.add(k0, tl.full((), 0x9E3779B9, tl.uint32), sanitize_overflow=False)
        k1 = tl.add(k1, tl.full((), 0xBB67AE85, tl.uint32), sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def exponential(word) -> Any:
    """Standard exponential noise, float32, from uint32 words."""
    v = tl.minimum(tl.maximum(word.to(tl.float32), 0.5) * 2.3283064365386963e-10, 1 - 5.960464477539063e-08)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return tl.where(v < _SERIES, series, -tl.log(1.0 - v))


@triton.jit
def _in_order(words, SHAPE: tl.constexpr) -> Any:
    """The four words of each counter side by side, reshaped to SHAPE."""
    return tl.reshape(tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])), SHAPE)


@triton.jit
def gumbel_bounds(seed, position, purpose: tl.constexpr, GROUPS: tl.constexpr) -> Any:
    """A bound from above of the noise in each of the first GROUPS groups of one row, near it where that is large.

    float32 [GROUPS], GROUPS at least 4. Without a logarithm: least >= v / 64, and the bits of a float32 as an integer
    grow as its logarithm does, in straight lines below it.
    """
    index = tl.arange(0, GROUPS // 4).to(tl.uint32) + tl.full((), _FROM, tl.uint32)
    word = _in_order(noise_words(seed, position, index, purpose), (GROUPS,))
    return word.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32) * -_SLOPE + _OFFSET


@triton.jit
def gumbels(seed, position, groups, purpose: tl.constexpr, NUM: tl.constexpr) -> Any:
    """Noise of the ids of some groups of one row: groups int32 [NUM] -> float32 [NUM, GROUP]."""
    fours = groups[:, None] * (_SIZE // 4) + tl.arange(0, _SIZE // 4)[None, :]
    e = exponential(_in_order(noise_words(seed, position, fours.to(tl.uint32), purpose), (NUM, _SIZE)))
    index = (groups // 4).to(tl.uint32) + tl.full((), _FROM, tl.uint32)
    w0, w1, w2, w3 = noise_words(seed, position, index, purpose)
    word = tl.where(groups % 4 < 2, tl.where(groups % 4 == 0, w0, w1), tl.where(groups % 4 == 2, w2, w3))
    least = exponential(word) * (1.0 / _SIZE)
    return -tl.log(e - tl.min(e, axis=1)[:, None] + least[:, None])
