"""Sampling from rows that filter: the best id that a threshold leaves, and in rows that top-p alone filters, a ladder.

There the best id may have to give way to one with a larger logit, and that again: see `nucleus`. A row climbs on until
an id is in the nucleus for certain, which is its answer: all ids of the groups above have less mass, or few groups are
above, and their ids have. Where many groups are above, somebody else has to sum them:

    ladder.ids[row, 0]     = the id at which it stopped;   ladder.logits[row, j] = the logit of ladder.ids[row, j]
    ladder.ids[row, j + 1] = the best id with logit > ladder.logits[row, j], or a later one if it falls out for certain
    ladder.edge[row]       = the row's largest logit, and top_p * (sum over id of exp((logit - largest) / T))
    ladder.thresholds[row] = what `top_k_top_p` gives where it need not be exact

There are -1 and +inf after the last rung, and from the first one in rows that are done. A row stops at a rung that is
likely to be inside, by an estimate, and at the last.

It is the part of `gumbel_argmax` for such batches; shapes are its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.draw import TILE, draw, first_best_torch, mass_above
from core_runner.sampling.kernels.group_maxima import top_p_alone
from core_runner.sampling.kernels.groups import (
    LEAST_TEMPERATURE,
    Groups,
    best_holder,
    group_masses,
    groups_argument,
    larger,
    load_row,
    log2_scale,
    weights,
)
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument
from core_runner.sampling.kernels.row_options import (
    is_top_p_alone,
    load_filters,
    load_noise_key,
    load_temperature,
    rows_argument,
)
from core_runner.sampling.kernels.top_k_top_p import row_threshold, tile_of, zero_bits
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.triton_import import tl, triton

RUNGS = 3
_FEW = 64  # groups above an id whose ids the row's own program sums
LEAST_NEED = 1e-30  # top_p may be too small for a float32; the best id is in the nucleus all the same
_NEED, _SURE = tl.constexpr(LEAST_NEED), tl.constexpr(1 - 1e-5)
_MARGIN = tl.constexpr(0.05)


class Launch(NamedTuple):
    """How a row's program runs."""

    num_warps: int = 8
    max_registers: int | None = 128  # so that two programs, and so all rows of a large batch, run at once


LAUNCH = Launch()


class Ladder(NamedTuple):
    """What a row would sample, and what it would sample from the ids above that."""

    ids: torch.Tensor  # int32 [n, RUNGS]
    logits: torch.Tensor  # float32 [n, RUNGS]
    edge: torch.Tensor  # float32 [n, 2]
    thresholds: torch.Tensor  # float32 [n]


def new_ladder(num_rows: int, device: torch.device) -> Ladder:
    """Room for the ladders of `num_rows` rows."""
    ids = torch.empty((num_rows, RUNGS), dtype=torch.int32, device=device)
    logits = torch.empty_like(ids, dtype=torch.float32)
    return Ladder(ids, logits, logits.new_empty((num_rows, 2)), logits.new_empty(num_rows))


def fill_ladder_torch(x: torch.Tensor, scores: torch.Tensor, rows: SamplingRows, ladder: Ladder) -> None:
    """Plain torch twin, which asks of no rung whether it is inside: logits and scores, float32 [n, vocab_size]."""
    best, alone = x.amax(dim=1, keepdim=True), top_p_alone(rows, x.shape[1])
    temperature = rows.temperature[rows.slots, None].clamp(min=LEAST_TEMPERATURE)
    mass = (torch.where(x == best, 0.0, x - best) / temperature).exp().sum(dim=1)
    ladder.edge[:, 0] = best[:, 0]
    ladder.edge[:, 1] = (rows.top_p[rows.slots] * mass).clamp(min=LEAST_NEED)
    for rung in range(RUNGS):
        ids = first_best_torch(scores)
        logit = x.gather(1, ids[:, None])
        has_id = (scores.amax(dim=1) > -torch.inf) & alone
        ladder.ids[:, rung] = torch.where(has_id, ids, -1)
        ladder.logits[:, rung] = torch.where(has_id, logit[:, 0], torch.inf)
        scores = scores.masked_fill(x <= logit, -torch.inf)


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c) -> Any:
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _is_inside(
    source,
    most,
    masses,
    groups,
    chosen,
    logit,
    peak,
    scale,
    need,
    top_p,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
) -> Any:
    """Whether the ids with larger logits have less mass than `need`: 1 if so, 0 if not, 2 likely, 3 perhaps."""
    is_above = most > logit
    # All ids of the groups that have one are an upper bound, and their largest ids a lower one.
    mass, of_largest = tl.where(is_above, masses, 0.0), tl.where(is_above, weights(most, peak, scale), 0.0)
    upper, lower, count = tl.reduce((mass, of_largest, is_above.to(tl.int32)), 0, _add_three)
    inside = tl.where(upper < need * _SURE, 1, 0)
    if (upper >= need * _SURE) & (lower * _SURE < need):
        if count <= FEW:
            sum_above = mass_above(source, most, chosen, logit, peak, scale, PADDED, TILE)
            inside = (sum_above < need).to(tl.int32)
        else:
            # The holders are as good as drawn at random: one of every 64 ids.
            _, _, _, _, holder_logits, _, num_groups, _ = groups
            held = load_row(holder_logits, source[1], num_groups, PADDED)
            weight = weights(held, peak, scale)
            part = tl.sum(tl.where(held > logit, weight, 0.0), axis=0)
            inside = tl.where(part < tl.sum(weight, axis=0) * (top_p - _MARGIN), 2, 3)
    return inside


@triton.jit
def _filtered_kernel(
    logits,
    logits_stride,
    vocab_size,
    rows,
    groups,
    overlay,
    chosen,
    token_ids,
    failed,
    ladder,
    purpose: tl.constexpr,
    RUNGS: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    SEARCH_TILE: tl.constexpr,
) -> None:
    """One row of a batch that filters."""
    row = tl.program_id(0).to(tl.int64)
    temperature = load_temperature(rows, row)
    top_k, top_p, min_p = load_filters(rows, row)
    seed, position = load_noise_key(rows, row)
    maxima, _, _, _, _, sums, num_groups, _ = groups
    source, key = (logits + row * logits_stride, row, vocab_size, overlay), (temperature, seed, position)
    rung_ids, rung_logits, edge, thresholds = ladder
    chosen, rung_ids, rung_logits = (
        chosen + row * num_groups,
        rung_ids + row * RUNGS,
        rung_logits + row * RUNGS,
    )
    for rung in tl.static_range(RUNGS):
        tl.store(rung_ids + rung, -1)
        tl.store(rung_logits + rung, float("inf"))

    if temperature > 0:
        most = load_row(maxima, row, num_groups, PADDED)
        peak = tl.reduce(most, 0, larger)
        most = tl.where(peak != peak, -float("inf"), most)
        filters = top_k, top_p, min_p
        threshold = row_threshold(
            source, groups, most, temperature, filters, chosen, False, ZERO_BITS, PADDED, SEARCH_TILE
        )
        tl.store(thresholds + row, threshold)
        climbs = is_top_p_alone(temperature, top_k, top_p, vocab_size)
        masses, need, scale = most, peak, log2_scale(temperature)
        if climbs:
            masses = group_masses(sums, most, row, num_groups, peak, scale, PADDED)
            need = tl.maximum(top_p * tl.sum(masses, axis=0), _NEED)
            tl.store(edge + row * 2, peak)
            tl.store(edge + row * 2 + 1, need)
        above, num_rungs = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int32)
        best, token_id = above, num_rungs
        goes_on = tl.full((), 1, tl.int32)
        while goes_on > 0:
            best, token_id, above = draw(
                source, key, groups, most, chosen, above, threshold, purpose, PADDED, TILE
            )
            inside = tl.full((), 1, tl.int32)
            if climbs & (best > -float("inf")):
                inside = _is_inside(
                    source, most, masses, groups, chosen, above, peak, scale, need, top_p, PADDED, TILE, FEW
                )
                if (inside > 1) | ((inside == 1) & (num_rungs > 0)):
                    tl.store(rung_ids + num_rungs, token_id)
                    tl.store(rung_logits + num_rungs, above)
                    num_rungs += 1
            goes_on = ((inside == 0) | ((inside == 3) & (num_rungs < RUNGS))).to(tl.int32)
    else:
        _largest, best, token_id, _bound = best_holder(groups, row, PARTS)
    tl.store(token_ids + row, tl.where(best > -float("inf"), token_id, 0).to(tl.int64))
    tl.store(failed + row, best == -float("inf"))


def filtered_argmax_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    chosen: torch.Tensor,
    ladder: Ladder,
    overlay: Overlay | None,
) -> None:
    """One program for every row."""
    num_groups = groups.other_bounds.shape[1]
    _filtered_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        rows_argument(rows),
        groups_argument(groups),
        kernel_argument(overlay),
        chosen,
        token_ids,
        failed,
        tuple(ladder),
        purpose=purpose,
        RUNGS=RUNGS,
        PADDED=triton.next_power_of_2(num_groups),
        PARTS=triton.next_power_of_2(groups.parts.shape[2]),
        TILE=TILE,
        FEW=_FEW,
        ZERO_BITS=zero_bits(logits.dtype, overlay),
        SEARCH_TILE=tile_of(num_groups),
        num_warps=LAUNCH.num_warps,
        maxnreg=LAUNCH.max_registers,
    )
