"""Top-k, top-p and min-p as one threshold per row: the sampler keeps the ids with logit >= threshold[row].

    k-th      = the top_k-th largest logit                                 top-k keeps logit >= k-th
    weight    = exp((logit - max) * (1 / T)) of the ids that top-k keeps
    p-th      = the largest t with  (sum of weight where logit >= t)  >=  top_p * (sum of weight)
    m-th      = max + T * log(min_p)                                       same as p(id) >= min_p * p(best)
    threshold = max(k-th, p-th, m-th)

Ties at a threshold are kept. A row that filters nothing (temperature 0, or every option off) gets -inf. The
threshold is a raw logit, not a scaled one, so applying it needs no scaling and no second rounding.

Where `exact` is False, p-th is left out in rows that top-p filters without top-k: finding it in a flat distribution
takes many reads of the row, and `nucleus` samples from them without it.

The k best ids lie in the k groups with the largest maxima, so a search by halves reads those alone.

logits [n, >= vocab_size] (any float type, strided rows), groups of them as `group_maxima` leaves them, thresholds
float32 [n], chosen: scratch, int32 like the groups; the rest in `SamplingRows`.
"""

from __future__ import annotations

from typing import Any

import torch

from core_runner.sampling.kernels.group_maxima import top_p_alone
from core_runner.sampling.kernels.groups import (
    LEAST_TEMPERATURE,
    Groups,
    collect,
    group_masses,
    groups_argument,
    load_groups,
    load_row,
    log2_scale,
    weights,
)
from core_runner.sampling.kernels.noise import GROUP
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument, overlaid_torch
from core_runner.sampling.kernels.row_options import load_filters, load_temperature, rows_argument
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_TILE = 4096 // GROUP  # groups that are looked at together
_GROUP = tl.constexpr(GROUP)
# Low bits of a float32 that are zero in every logit of a type: a search has as many steps fewer.
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
_SLACK = tl.constexpr(14)  # maxima more than k that end the search for the k-th


def top_k_top_p_torch(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    exact: bool,
    thresholds: torch.Tensor,
    overlay: Overlay | None = None,
) -> None:
    """Plain torch twin, by sorting."""
    x = overlaid_torch(logits, vocab_size, overlay).float().sort(dim=1, descending=True).values
    best = x[:, :1]
    temperature = rows.temperature[rows.slots][:, None]
    top_k, top_p, min_p = (t[rows.slots][:, None] for t in (rows.top_k, rows.top_p, rows.min_p))
    if not exact:
        top_p = top_p.masked_fill(top_p_alone(rows, vocab_size)[:, None], 1.0)

    last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size).long() - 1
    kth = torch.where(top_k > 0, x.gather(1, last), -torch.inf)
    scaled = torch.where(x == best, 0.0, x - best) / temperature.clamp(min=LEAST_TEMPERATURE)
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
def _tally(
    source, chosen, num_chosen, first, low, best, scale, BY_MASS: tl.constexpr, TILE: tl.constexpr
) -> Any:
    """How many logits of the chosen groups are >= low, and the sum of their weights (by count: the same number).

    first: those of the first TILE groups, which are often all. low must be above -inf where the count matters: padding
    is -inf.
    """
    counts = (first >= low).to(tl.int32)
    masses = tl.zeros((TILE, _GROUP), tl.float32)
    if BY_MASS:
        masses = tl.where(first >= low, weights(first, best, scale), 0.0)
    for start in range(TILE, num_chosen, TILE):
        _, x = load_groups(source, chosen, start, num_chosen, TILE)
        counts += (x >= low).to(tl.int32)
        if BY_MASS:
            masses += tl.where(x >= low, weights(x, best, scale), 0.0)
    count = tl.sum(tl.sum(counts, axis=1), axis=0)
    return count, tl.sum(tl.sum(masses, axis=1), axis=0) if BY_MASS else count


@triton.jit
def _middle(low, high) -> Any:
    """The mean of two int32, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _bisect(
    source,
    chosen,
    num_chosen,
    first,
    low,
    high,
    need,
    best,
    scale,
    BY_MASS: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """A key in [low, high) such that the logits from it on are the fewest whose tally reaches `need`.

    `low` reaches it, `high` does not. It ends early once the set is decided: at the exact count, or with one logit
    left in between.
    """
    num_low, num_high = num_chosen * _GROUP, num_chosen * 0
    while (low + 1 < high) & (num_low - num_high > 1):
        middle = _middle(low, high)
        at = _logit(middle, ZERO_BITS)
        count, amount = _tally(source, chosen, num_chosen, first, at, best, scale, BY_MASS, TILE)
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
def _kth_maximum(maxima, low, high, top_k, num_groups, ZERO_BITS: tl.constexpr, PADDED: tl.constexpr) -> Any:
    """A key from which on there are at least top_k of the maxima, and few more; `low` if there are fewer in all."""
    # Every sixteen of them have their largest: a good start where k is not larger than the number of those.
    if PADDED >= 16:  # noqa: SIM102 (known when it is compiled, and the other is not)
        if top_k * 16 <= num_groups:
            tops = tl.max(tl.reshape(maxima, (PADDED // 16, 16)), axis=1)
            tops = tl.where(tl.arange(0, PADDED // 16) * 16 < num_groups, tops, float("inf"))
            low = tl.maximum(low, _key(tl.min(tops, axis=0), ZERO_BITS))
    num_low = top_k * 0 + num_groups  # a single group is a compile-time constant, which no loop may change
    while (low + 1 < high) & (num_low > top_k + _SLACK):
        middle = _middle(low, high)
        count = tl.sum((maxima >= _logit(middle, ZERO_BITS)).to(tl.int32), axis=0)
        low, num_low = tl.where(count >= top_k, middle, low), tl.where(count >= top_k, count, num_low)
        high = tl.where(count >= top_k, high, middle)
    return low


@triton.jit
def row_threshold(
    source,
    groups,
    most,
    temperature,
    filters,
    chosen,
    EXACT: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Threshold of one row, -inf where it filters nothing.

    source: as in `groups`; most [PADDED]: the maxima of its groups, as `load_row` gives them; filters: as
    `load_filters` gives them; chosen: scratch, as in `draw`.
    """
    top_k, top_p, min_p = filters
    _, _, _, _, _, sums, num_groups, _ = groups
    _, row, vocab_size, _ = source
    by_count = (temperature > 0) & (top_k > 0) & (top_k < vocab_size)
    by_mass = (temperature > 0) & (top_p < 1) & (EXACT | by_count)
    threshold = tl.full((), -float("inf"), tl.float32)
    best = tl.max(most, axis=0)
    if by_count | by_mass:
        scale = log2_scale(temperature)
        low, high = _key(threshold, ZERO_BITS), _key(best, ZERO_BITS) + 1
        if by_count:
            low = _kth_maximum(most, low, high, top_k, num_groups, ZERO_BITS, PADDED)
        else:
            # Even a whole vocabulary below this holds less than half of what top-p may leave out.
            floor = best + temperature * tl.log((1.0 - top_p) * 0.5 / vocab_size)
            low = tl.where(floor > threshold, tl.maximum(low, _key(floor, ZERO_BITS)), low)
        count = collect(
            chosen, (most >= _logit(low, ZERO_BITS)) & (tl.arange(0, PADDED) < num_groups), PADDED
        )
        first = load_groups(source, chosen, 0, count, TILE)[1]
        if by_count:
            low = _bisect(source, chosen, count, first, low, high, top_k, best, scale, False, ZERO_BITS, TILE)
        if by_mass:
            if by_count:
                kth = _logit(low, ZERO_BITS)
                _num_kept, mass = _tally(source, chosen, count, first, kth, best, scale, True, TILE)
            else:
                mass = tl.sum(group_masses(sums, most, row, num_groups, best, scale, PADDED), axis=0)
            need = top_p * mass
            low = _bisect(source, chosen, count, first, low, high, need, best, scale, True, ZERO_BITS, TILE)
        threshold = _logit(low, ZERO_BITS)
    if (temperature > 0) & (min_p > 0):
        threshold = tl.maximum(threshold, best + temperature * tl.log(min_p))
    return threshold


@triton.jit
def _top_k_top_p_kernel(
    logits,
    logits_stride,
    vocab_size,
    rows,
    groups,
    overlay,
    chosen,
    thresholds,
    EXACT: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Threshold of one row."""
    row = tl.program_id(0).to(tl.int64)
    maxima, _, _, _, _, _, num_groups, _ = groups
    source = logits + row * logits_stride, row, vocab_size, overlay
    most = load_row(maxima, row, num_groups, PADDED)
    temperature, filters = load_temperature(rows, row), load_filters(rows, row)
    threshold = row_threshold(
        source,
        groups,
        most,
        temperature,
        filters,
        chosen + row * num_groups,
        EXACT,
        ZERO_BITS,
        PADDED,
        TILE,
    )
    tl.store(thresholds + row, threshold)


def tile_of(num_groups: int) -> int:
    """Groups of a row that are looked at together."""
    return min(_TILE, int(triton.next_power_of_2(num_groups)))


def zero_bits(dtype: torch.dtype, overlay: Overlay | None) -> int:
    """Low bits that are zero in all of a step's logits, as float32."""
    return _ZERO_BITS[dtype if overlay is None else torch.float32]


def top_k_top_p_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    groups: Groups,
    exact: bool,
    thresholds: torch.Tensor,
    chosen: torch.Tensor,
    overlay: Overlay | None = None,
) -> None:
    """One program for every row; a row without a filter leaves at once."""
    num_groups = groups.other_bounds.shape[1]
    _top_k_top_p_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        rows_argument(rows),
        groups_argument(groups),
        kernel_argument(overlay),
        chosen,
        thresholds,
        EXACT=exact,
        ZERO_BITS=zero_bits(logits.dtype, overlay),
        PADDED=triton.next_power_of_2(num_groups),
        TILE=tile_of(num_groups),
        num_warps=8,
    )


def top_k_top_p(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    groups: Groups,
    exact: bool,
    thresholds: torch.Tensor,
    overlay: Overlay | None = None,
) -> None:
    """Fill `thresholds` for every row of logits; see the module's formula and shapes."""
    if not use_triton(logits):
        top_k_top_p_torch(logits, vocab_size, rows, exact, thresholds, overlay)
        return
    chosen = torch.empty_like(groups.other_bounds, dtype=torch.int32)
    top_k_top_p_triton(logits, vocab_size, rows, groups, exact, thresholds, chosen, overlay)
