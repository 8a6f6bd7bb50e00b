"""Top-k, top-p and min-p as one threshold per row: the sampler keeps the ids with logit >= threshold[row].

    k-th      = the top_k-th largest logit                                 top-k keeps logit >= k-th
    weight    = exp((logit - max) * (1 / T)) of the ids that top-k keeps
    p-th      = the largest t with  (sum of weight where logit >= t)  >=  top_p * (sum of weight)
    m-th      = max + T * log(min_p)                                       same as p(id) >= min_p * p(best)
    threshold = max(k-th, p-th, m-th)

Ties at a threshold are kept. A row that filters nothing (temperature 0, or every option off) gets -inf. The
threshold is a raw logit, not a scaled one, so applying it needs no scaling and no second rounding.

logits [n, >= vocab_size] (any float type, strided rows), thresholds float32 [n]; the rest in `SamplingRows`.
"""

from __future__ import annotations

from typing import Any

import torch

from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_MIN_TEMPERATURE = 1e-30  # its inverse is finite; a smaller temperature leaves only the largest logits anyway


def top_k_top_p_torch(
    logits: torch.Tensor, vocab_size: int, rows: SamplingRows, thresholds: torch.Tensor
) -> None:
    """Plain torch twin, by sorting."""
    x = logits[:, :vocab_size].float().sort(dim=1, descending=True).values
    best = x[:, :1]
    temperature = rows.temperature[rows.slots][:, None]
    top_k, top_p, min_p = (t[rows.slots][:, None] for t in (rows.top_k, rows.top_p, rows.min_p))

    last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size).long() - 1
    kth = torch.where(top_k > 0, x.gather(1, last), -torch.inf)
    scaled = torch.where(x == best, 0.0, x - best) / temperature.clamp(min=_MIN_TEMPERATURE)
    mass = torch.where(x >= kth, scaled.exp(), 0.0).double().cumsum(dim=1)
    reached = mass >= top_p * mass[:, -1:]
    pth = torch.where(top_p < 1, x.gather(1, reached.to(torch.uint8).argmax(dim=1, keepdim=True)), -torch.inf)
    mth = torch.where(min_p > 0, best + temperature * min_p.log(), -torch.inf)

    threshold = torch.maximum(torch.maximum(kth, pth), mth)
    thresholds.copy_(torch.where(temperature > 0, threshold, -torch.inf)[:, 0])


@triton.jit
def _key(x) -> Any:
    """int32 that orders as the float32 does; -0.0 and 0.0 share one. Its own inverse on the bits."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _tally(base, vocab_size, low, best, inverse, BLOCK: tl.constexpr) -> Any:
    """How many keys of a row are >= low, and the sum of their weights."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lane < vocab_size
        x = tl.load(base + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        kept = inside & (_key(x) >= low)
        counts += kept.to(tl.int32)
        weights += tl.where(kept, tl.exp(tl.where(x == best, 0.0, (x - best) * inverse)), 0.0)
    return tl.sum(counts, axis=0), tl.sum(weights, axis=0)


@triton.jit
def _bisect(
    base, vocab_size, low, num_low, high, need, best, inverse, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
) -> Any:
    """A key in [low, high) such that the keys >= it are the fewest whose tally reaches `need`.

    `low` reaches it, `high` does not; num_low is the count at `low`. It ends early once the set is decided:
    at the exact count, or with one key left in between.
    """
    num_high = num_low * 0
    while (low + 1 < high) & (num_low - num_high > 1):
        middle = (low & high) + ((low ^ high) >> 1)
        count, mass = _tally(base, vocab_size, middle, best, inverse, BLOCK)
        if BY_MASS:
            reached = mass >= need
        else:
            reached = count >= need
            num_high = tl.where(count == need, count, num_high)
        low = tl.where(reached, middle, low)
        num_low = tl.where(reached, count, num_low)
        high = tl.where(reached, high, middle)
        num_high = tl.where(reached, num_high, count)
    return low


@triton.jit
def _top_k_top_p_kernel(
    logits,
    logits_stride,
    vocab_size,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    parameter_stride,
    thresholds,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Threshold of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(slots + row).to(tl.int64) * parameter_stride
    temperature = tl.load(temperatures + at)
    top_k, top_p, min_p = tl.load(top_ks + at), tl.load(top_ps + at), tl.load(min_ps + at)
    by_count = (top_k > 0) & (top_k < vocab_size)
    if (temperature <= 0) | ((not by_count) & (top_p >= 1) & (min_p <= 0)):
        tl.store(thresholds + row, -float("inf"))
        return

    base = logits + row * logits_stride
    lane = tl.arange(0, BLOCK)
    bests = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lane < vocab_size
        x = tl.load(base + start + lane, mask=inside, other=-float("inf"))
        bests = tl.maximum(bests, x.to(tl.float32))
    best = tl.max(bests, axis=0)
    inverse = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)

    low = _key(tl.full((), -float("inf"), tl.float32))
    high = _key(best) + 1
    if by_count:
        # A vocabulary of 1 is a compile-time constant, which cannot be a loop's variable.
        count = tl.full((), 0, tl.int32) + vocab_size
        low = _bisect(base, vocab_size, low, count, high, top_k, best, inverse, False, BLOCK)
    if top_p < 1:
        count, mass = _tally(base, vocab_size, low, best, inverse, BLOCK)
        low = _bisect(base, vocab_size, low, count, high, top_p * mass, best, inverse, True, BLOCK)
    threshold = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    if min_p > 0:
        threshold = tl.maximum(threshold, best + temperature * tl.log(min_p))
    tl.store(thresholds + row, threshold)


def top_k_top_p_triton(
    logits: torch.Tensor, vocab_size: int, rows: SamplingRows, thresholds: torch.Tensor
) -> None:
    """One program for every row; a row without a filter leaves at once."""
    _top_k_top_p_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        rows.slots,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.temperature.stride(0),
        thresholds,
        MIN_TEMPERATURE=_MIN_TEMPERATURE,
        BLOCK=4096 if vocab_size > 4096 else 1024,
    )


def top_k_top_p(logits: torch.Tensor, vocab_size: int, rows: SamplingRows, thresholds: torch.Tensor) -> None:
    """Fill `thresholds` for every row of logits; see the module's formula and shapes."""
    run = top_k_top_p_triton if use_triton(logits) else top_k_top_p_torch
    run(logits, vocab_size, rows, thresholds)
