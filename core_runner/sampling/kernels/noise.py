"""Sampling noise: a pure function of (seed, position, token id, purpose) and of a version number.

    words(i)   = philox4x32_10(key = seed, counter = (i, position, purpose, NOISE_VERSION))
    e[id]      = exponential(words(id // 4)[id % 4])
    a, b       = the two words of words(2^31 + g // 2) from 2 * (g % 2) on        g = id // 64, a group of 64 ids
    least[g]   = exponential(a) / 64,   holder[g] = b % 64
    gap[g]     = exponential(b - b % 64 + 32) / 63
    gumbel[id] = -log(least[g])                                         for the group's holder, id % 64 == holder[g]
                 -log(least[g] + gap[g] + e[id] - (smallest e of the group's other ids))          for the other ids

    exponential(word) = -log(1 - v),   v = clamp(float(word), 0.5) * 2^-32, at most 1 - 2^-24

That is independent Gumbel noise, finite, in [-2.85, 27.05]: the smallest of 64 exponentials has 64 times the rate, any
of them may be it, and above it the other 63 are independent exponentials again, whose smallest has 63 times the rate
and is independent of what the others have above it. What it buys: one draw for two groups of 64 ids gives the largest
noise of each and the id that has it, and a bound for the others. The ids' own words are drawn in few groups of a row.

The tail that decides an argmax is a small `least`, where a float32 is finest; so the stream resolves probabilities
down to 2^-32. Whatever changes a stream (layout, rounds, conversion) must raise `NOISE_VERSION`.
"""

from __future__ import annotations

from typing import Any

import torch

from model_states.kernels.triton_import import tl, triton

NOISE_VERSION = 2
GROUP = 64  # ids of a group
LEAST_GUMBEL = -2.9  # less than any noise, with room for rounding

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
_SIZE, _INVERSE, _LN_2 = tl.constexpr(GROUP), tl.constexpr(1 / (GROUP - 1)), tl.constexpr(0.6931471805599453)


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


def group_noise_torch(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`least`, `gap` (float32) and `holder` (int64) of every group, [n, num_groups] each."""
    words = noise_words_torch(seeds, positions, purpose, _GROUPS_FROM, -(-num_groups // 2))
    a, b = words[:, : 2 * num_groups : 2], words[:, 1 : 2 * num_groups : 2]
    holder = b % GROUP
    gap = exponential_torch(b - holder + GROUP // 2) / (GROUP - 1)
    return exponential_torch(a) / GROUP, gap, holder


def gumbel_torch(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, num_ids: int) -> torch.Tensor:
    """Gumbel noise of every id: seeds and positions int64 [n] -> float32 [n, num_ids]."""
    # Whole groups, whatever the vocabulary, so that an id's noise does not depend on its size.
    num_groups = -(-num_ids // GROUP)
    e = exponential_torch(noise_words_torch(seeds, positions, purpose, 0, num_groups * GROUP // 4))
    e = e.unflatten(1, (num_groups, GROUP))
    least, gap, holder = (t[:, :, None] for t in group_noise_torch(seeds, positions, purpose, num_groups))
    is_holder = torch.arange(GROUP, device=e.device) == holder
    lowest = e.masked_fill(is_holder, torch.inf).amin(dim=2, keepdim=True)
    return -torch.log(least + torch.where(is_holder, 0.0, gap + (e - lowest))).flatten(1)[:, :num_ids]


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
def _fraction(word) -> Any:
    """The v of `exponential`, and its series."""
    v = tl.minimum(tl.maximum(word.to(tl.float32), 0.5) * 2.3283064365386963e-10, 1 - 5.960464477539063e-08)
    return v, v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))


@triton.jit
def exponential(word) -> Any:
    """Standard exponential noise, float32, from uint32 words."""
    v, series = _fraction(word)
    return tl.where(v < _SERIES, series, -tl.log(1.0 - v))


@triton.jit
def _bits_log2(x) -> Any:
    """log2(x) + 127, or up to 0.0861 less, of a normal float32 x > 0: its exponent and mantissa, read as one number."""
    return x.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def least_exponential(word) -> Any:
    """No more than `exponential`, and less by 0.06 at most, without its logarithm; by far less where it is small."""
    v, series = _fraction(word)
    return tl.maximum(series, (126.9139 - _bits_log2(1.0 - v)) * _LN_2) * (1 - 2.0**-22)  # where both round


@triton.jit
def most_gumbel(x) -> Any:
    """No less than -log(x), and more by 0.06 at most, without a logarithm."""
    return (127.00002 - _bits_log2(x)) * _LN_2


@triton.jit
def group_noise(seed, position, groups, purpose: tl.constexpr) -> Any:
    """`least`, `gap` and `holder` of some groups of one row: int32 [n] -> float32 [n], float32 [n], int32 [n]."""
    index = (groups // 2).to(tl.uint32) + tl.full((), _FROM, tl.uint32)
    w0, w1, w2, w3 = noise_words(seed, position, index, purpose)
    a, b = tl.where(groups % 2 == 0, w0, w2), tl.where(groups % 2 == 0, w1, w3)
    holder = b % _SIZE
    gap = exponential(b - holder + _SIZE // 2) * _INVERSE
    return exponential(a) * (1.0 / _SIZE), gap, holder.to(tl.int32)


@triton.jit
def pair_noise(seed, position, pairs, purpose: tl.constexpr, NUM: tl.constexpr) -> Any:
    """`group_noise` of groups 2 * pairs and 2 * pairs + 1, side by side, of one draw: int32 [NUM] -> [2 * NUM] each.

    But for `gap`, which may be a little less, so that it takes no logarithm.
    """
    index = pairs.to(tl.uint32) + tl.full((), _FROM, tl.uint32)
    w0, w1, w2, w3 = noise_words(seed, position, index, purpose)
    a, b = tl.reshape(tl.join(w0, w2), (2 * NUM,)), tl.reshape(tl.join(w1, w3), (2 * NUM,))
    holder = b % _SIZE
    gap = least_exponential(b - holder + _SIZE // 2) * _INVERSE
    return exponential(a) * (1.0 / _SIZE), gap, holder.to(tl.int32)


@triton.jit
def id_words(seed, position, groups, purpose: tl.constexpr, NUM: tl.constexpr) -> Any:
    """The words of all ids of some groups of one row: groups int32 [NUM] -> uint32 [NUM, GROUP]."""
    fours = groups[:, None] * (_SIZE // 4) + tl.arange(0, _SIZE // 4)[None, :]
    w0, w1, w2, w3 = noise_words(seed, position, fours.to(tl.uint32), purpose)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (NUM, _SIZE))


@triton.jit
def least_of_others(words, holder) -> Any:
    """The smallest e of the ids of each group but its holder: uint32 [n, GROUP], int32 [n] -> float32 [n]."""
    is_holder = tl.arange(0, _SIZE)[None, :] == holder[:, None]
    return exponential(tl.min(tl.where(is_holder, 0xFFFFFFFF, words), axis=1))


@triton.jit
def gumbel_of_other(word, least, gap, least_other) -> Any:
    """Noise of an id that is not its group's holder, from its word and what its group has."""
    return -tl.log(least + (gap + (exponential(word) - least_other)))


@triton.jit
def most_gumbel_of_other(word, least, gap, least_other) -> Any:
    """No less than `gumbel_of_other`, and more by 0.2 at most where it is not far below the group's largest."""
    return most_gumbel(least + (gap + tl.maximum(least_exponential(word) - least_other, 0.0)))
