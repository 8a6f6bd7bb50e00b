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

from typing import Any, NamedTuple

import torch

from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton


class Launch(NamedTuple):
    """How a row's program runs. stages: blocks of logits on their way at once."""

    num_warps: int = 16
    stages: int = 3
    max_registers: int | None = 64  # so that two programs, and so all rows of a large batch, run at once


LAUNCH = Launch()

# Lanes of a program. With four logits each, 4096 lanes hold the 200 best of a row in 999 cases of 1000.
_MIN_LANES, _MAX_LANES = 256, 4096
# Low bits of a float32 that are zero in every logit of a type: a search has as many steps fewer.
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
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
def _key(x, ZERO_BITS: tl.constexpr) -> Any:
    """int32 that orders as the logit does."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> ZERO_BITS


@triton.jit
def _logit(key, ZERO_BITS: tl.constexpr) -> Any:
    """The logit that has this key; comparing logits makes the two zeros equal again, whose keys differ by one."""
    bits = key << ZERO_BITS
    return (bits ^ ((bits >> 31) & (0x7FFFFFFF >> ZERO_BITS << ZERO_BITS))).to(tl.float32, bitcast=True)


@triton.jit
def _lane_tops(
    base, vocab_size, inverse, WITH_MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
) -> Any:
    """The four largest logits of each lane, a lane being the ids that are equal modulo BLOCK, in one pass.

    WITH_MASS: also the sum of the row's weights, relative to each lane's largest until the end.
    """
    lane = tl.arange(0, BLOCK)
    t0 = tl.full((BLOCK,), -float("inf"), tl.float32)
    t1, t2, t3 = t0, t0, t0
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        inside = lane < vocab_size - start
        x = tl.load(base + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        if WITH_MASS:
            # Differences of equal infinities are NaN, hence the tests for equality, here and below.
            ratio = tl.exp(tl.where(x == t0, 0.0, -tl.abs(x - t0) * inverse))
            mass = tl.where(x > t0, mass * ratio + 1.0, mass + ratio)
        t3 = tl.maximum(t3, tl.minimum(t2, x))
        t2 = tl.maximum(t2, tl.minimum(t1, x))
        t1 = tl.maximum(t1, tl.minimum(t0, x))
        t0 = tl.maximum(t0, x)
    best = tl.max(t0, axis=0)
    if WITH_MASS:
        mass *= tl.where(t0 == best, 1.0, tl.exp((t0 - best) * inverse))
    return t0, t1, t2, t3, best, tl.sum(mass, axis=0)


@triton.jit
def _tally_block(x, inside, low, best, inverse, BY_MASS: tl.constexpr) -> Any:
    """Where the logit is >= low: 1, and its weight (1 for a tally by count); 0 and 0 elsewhere."""
    kept = inside & (x >= low)
    count = kept.to(tl.int32)
    amount = count
    if BY_MASS:
        weight = tl.exp(tl.where(x == best, 0.0, (x - best) * inverse))
        amount = tl.where(kept, weight, 0.0)
    return count, amount


@triton.jit
def _tally_row(
    base, vocab_size, low, best, inverse, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
) -> Any:
    """How many logits of the row are >= low, and the sum of what `_tally_block` gives for them."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    amounts = tl.zeros((BLOCK,), tl.float32 if BY_MASS else tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        inside = lane < vocab_size - start
        x = tl.load(base + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        count, amount = _tally_block(x, inside, low, best, inverse, BY_MASS)
        counts += count
        amounts += amount
    return tl.sum(counts, axis=0), tl.sum(amounts, axis=0)


@triton.jit
def _tally_tops(tops, low, best, inverse, BY_MASS: tl.constexpr) -> Any:
    """`_tally_row` over the lanes' four largest alone; low must be above -inf, which fills lanes."""
    c0, a0 = _tally_block(tops[0], True, low, best, inverse, BY_MASS)
    c1, a1 = _tally_block(tops[1], True, low, best, inverse, BY_MASS)
    c2, a2 = _tally_block(tops[2], True, low, best, inverse, BY_MASS)
    c3, a3 = _tally_block(tops[3], True, low, best, inverse, BY_MASS)
    return tl.sum(c0 + c1 + c2 + c3, axis=0), tl.sum(a0 + a1 + a2 + a3, axis=0)


@triton.jit
def _bisect(
    base,
    vocab_size,
    tops,
    low,
    num_low,
    high,
    need,
    best,
    inverse,
    BY_MASS: tl.constexpr,
    ROW: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> Any:
    """A key in [low, high) such that the logits from it on are the fewest whose tally reaches `need`.

    `low` reaches it, `high` does not; num_low is at least the count at `low`. It ends early once the set is
    decided: at the exact count, or with one logit left in between. ROW: tally the row, else the lanes' tops.
    """
    num_high = num_low * 0
    while (low + 1 < high) & (num_low - num_high > 1):
        # The mean of two int32 without overflow.
        middle = (low & high) + ((low ^ high) >> 1)
        at = _logit(middle, ZERO_BITS)
        if ROW:
            count, amount = _tally_row(base, vocab_size, at, best, inverse, BY_MASS, BLOCK, STAGES)
        else:
            count, amount = _tally_tops(tops, at, best, inverse, BY_MASS)
        reached = amount >= need
        if not BY_MASS:
            # Exactly enough: nothing between can matter, which closes the gap.
            num_high = tl.where(count == need, count, num_high)
        low = tl.where(reached, middle, low)
        num_low = tl.where(reached, count, num_low)
        high = tl.where(reached, high, middle)
        num_high = tl.where(reached, num_high, count)
    return low


@triton.jit
def _search(
    base,
    vocab_size,
    tops,
    low,
    num_low,
    high,
    need,
    best,
    inverse,
    BY_MASS: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> Any:
    """`_bisect` over the lanes' tops, and over the row if those may not hold every logit that counts.

    The tops' tally is at most the row's, so what the first finds is a lower bound for the second; and it is the
    answer if each lane's fourth is below it, for then no lane hides a logit above it.
    """
    found = _bisect(
        base,
        vocab_size,
        tops,
        low,
        num_low,
        high,
        need,
        best,
        inverse,
        BY_MASS,
        False,
        ZERO_BITS,
        BLOCK,
        STAGES,
    )
    if tl.max(tops[3], axis=0) >= _logit(found, ZERO_BITS):
        found = _bisect(
            base,
            vocab_size,
            tops,
            found,
            num_low,
            high,
            need,
            best,
            inverse,
            BY_MASS,
            True,
            ZERO_BITS,
            BLOCK,
            STAGES,
        )
    return found


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
    ZERO_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
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
    inverse = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)
    if by_count | (top_p >= 1):
        t0, t1, t2, t3, best, mass = _lane_tops(base, vocab_size, inverse, False, BLOCK, STAGES)
    else:
        t0, t1, t2, t3, best, mass = _lane_tops(base, vocab_size, inverse, True, BLOCK, STAGES)
    tops = (t0, t1, t2, t3)
    low = _key(tl.full((), -float("inf"), tl.float32), ZERO_BITS)
    high = _key(best, ZERO_BITS) + 1
    # A vocabulary of 1 is a compile-time constant, which cannot be a loop's variable.
    count = tl.full((), 0, tl.int32) + vocab_size
    if by_count:
        low = _search(
            base, vocab_size, tops, low, count, high, top_k, best, inverse, False, ZERO_BITS, BLOCK, STAGES
        )
    if top_p < 1:
        if by_count:
            kth = _logit(low, ZERO_BITS)
            # What the search found in the tops alone, their mass has, too.
            if tl.max(t3, axis=0) < kth:
                count, mass = _tally_tops(tops, kth, best, inverse, True)
            else:
                count, mass = _tally_row(base, vocab_size, kth, best, inverse, True, BLOCK, STAGES)
        # Even a whole vocabulary below this holds less than half of what top-p may leave out.
        floor = best + temperature * tl.log((1.0 - top_p) * 0.5 / vocab_size)
        low = tl.where(floor > -float("inf"), tl.maximum(low, _key(floor, ZERO_BITS)), low)
        need = top_p * mass
        low = _search(
            base, vocab_size, tops, low, count, high, need, best, inverse, True, ZERO_BITS, BLOCK, STAGES
        )
    threshold = _logit(low, ZERO_BITS)
    if min_p > 0:
        threshold = tl.maximum(threshold, best + temperature * tl.log(min_p))
    tl.store(thresholds + row, threshold)


def top_k_top_p_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    thresholds: torch.Tensor,
    launch: Launch = LAUNCH,
) -> None:
    """One program for every row; a row without a filter leaves at once."""
    if vocab_size == 1:  # nothing can be dropped, and Triton 3.6 crashes on compiling for a size of 1
        thresholds.fill_(-torch.inf)
        return
    stride = rows.temperature.stride(0)
    assert stride == rows.top_k.stride(0) == rows.top_p.stride(0) == rows.min_p.stride(0)
    _top_k_top_p_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        rows.slots,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        stride,
        thresholds,
        MIN_TEMPERATURE=_MIN_TEMPERATURE,
        ZERO_BITS=_ZERO_BITS[logits.dtype],
        BLOCK=min(_MAX_LANES, max(_MIN_LANES, triton.next_power_of_2(vocab_size))),
        STAGES=launch.stages,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )


def top_k_top_p(logits: torch.Tensor, vocab_size: int, rows: SamplingRows, thresholds: torch.Tensor) -> None:
    """Fill `thresholds` for every row of logits; see the module's formula and shapes."""
    run = top_k_top_p_triton if use_triton(logits) else top_k_top_p_torch
    run(logits, vocab_size, rows, thresholds)
