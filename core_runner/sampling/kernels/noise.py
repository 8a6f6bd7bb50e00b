"""Sampling noise: a pure function of (seed, position, token id, purpose) and of a version number.

    words   = philox4x32_10(key = seed, counter = (token_id // 4, position, purpose, NOISE_VERSION))
    bits    = words[token_id % 4]                                uint32; one Philox call serves four ids
    v       = clamp(float(bits), 0.5) * 2^-32, at most 1 - 2^-24     strictly between 0 and 1
    gumbel  = -log(-log(1 - v))                                  finite, in [-2.82, 22.88]

The tail that decides an argmax is small v, where a float32 is finest; so the stream resolves probabilities
down to 2^-32. Whatever changes a stream (layout, rounds, conversion) must raise `NOISE_VERSION`.
"""

from __future__ import annotations

from typing import Any

import torch

from model_states.kernels.triton_import import tl, triton

NOISE_VERSION = 1

# What a draw is for. Two decisions at one position never share a number.
TARGET = 0
DRAFT = 1
ACCEPT = 2
RESIDUAL = 3

_ROUNDS = 10
_MASK = 0xFFFFFFFF
_SERIES_BELOW = 2.0**-8  # below this, -log(1 - v) by its series: 1 - v would round the low bits of v away
_VERSION = tl.constexpr(NOISE_VERSION)
_SERIES = tl.constexpr(_SERIES_BELOW)


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


def noise_bits_torch(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int, num_ids: int
) -> torch.Tensor:
    """Random words for ids 0 to num_ids - 1 of each row.

    seeds, positions: int64 [n]. Returns int64 [n, num_ids] that holds uint32 values.
    """
    # Whole groups of four, whatever the vocabulary, so that an id's word does not depend on its size.
    groups = torch.arange((num_ids + 3) // 4, device=seeds.device)[None, :]
    seed, position = seeds.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    fixed = torch.zeros_like(position)
    counter = (
        groups + fixed,
        (position & _MASK) + torch.zeros_like(groups),
        fixed + purpose,
        fixed + NOISE_VERSION,
    )
    words = philox_torch((seed & _MASK, (seed >> 32) & _MASK), counter)
    return torch.stack(words, dim=-1).flatten(1)[:, :num_ids]


def gumbel_from_bits_torch(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, from words as `noise_bits_torch` gives them."""
    v = (bits.to(torch.float32).clamp(min=0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return -torch.log(torch.where(v < _SERIES_BELOW, series, -torch.log(1.0 - v)))


def gumbel_torch(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, num_ids: int) -> torch.Tensor:
    """Gumbel noise of every id: seeds and positions int64 [n] -> float32 [n, num_ids]."""
    return gumbel_from_bits_torch(noise_bits_torch(seeds, positions, purpose, num_ids))


@triton.jit
def _wide_product(word, factor) -> Any:
    """High and low 32 bits of a product of uint32: one multiplication where a product of each half takes two."""
    product = word.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def noise_bits(seed, position, first_group, purpose: tl.constexpr, GROUPS: tl.constexpr) -> Any:
    """Words of ids [4 * first_group, 4 * (first_group + GROUPS)) of one row, uint32 [GROUPS, 4]."""
    c0 = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    # All but the group is one number for the row, and stays one through the first rounds.
    c1 = position.to(tl.uint32)
    c2, c3 = tl.full((), purpose, tl.uint32), tl.full((), _VERSION, tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a_high, a_low = _wide_product(c0, 0xD2511F53)
        b_high, b_low = _wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = b_high ^ c1 ^ k0, b_low, a_high ^ c3 ^ k1, a_low
        k0 = tl.add(k0, tl.full((), 0x9E3779B9, tl.uint32), sanitize_overflow=False)
        k1 = tl.add(k1, tl.full((), 0xBB67AE85, tl.uint32), sanitize_overflow=False)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (GROUPS, 4))


@triton.jit
def gumbel_from_bits(bits) -> Any:
    """Standard Gumbel noise, float32, from uint32 words."""
    v = tl.minimum(tl.maximum(bits.to(tl.float32), 0.5) * 2.3283064365386963e-10, 1 - 5.960464477539063e-08)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return -tl.log(tl.where(v < _SERIES, series, -tl.log(1.0 - v)))
