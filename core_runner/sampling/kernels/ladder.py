"""Sampling from rows that filter: the best id that a threshold leaves, and in rows that top-p alone filters, a ladder.

There the best id may have to give way to one with a larger logit, and that again: see `nucleus`. A row climbs on until
an id is in the nucleus for certain, which is its answer: all ids of the groups above have less mass, or few groups are
above, and their ids have. Where many groups are above, somebody else has to sum them:

    ladder.ids[row, 0]     = the id at which it stopped;   ladder.logits[row, j] = the logit of ladder.ids[row, j]
    ladder.ids[row, j + 1] = the best id with logit > ladder.logits[row, j], or a later one if it falls out for certain
    ladder.edge[row]       = the row's largest logit, and top_p * (sum over id of exp((logit - largest) / T))

There are -1 and +inf after the last rung, and from the first one in rows that are done. A row stops at a rung that is
likely to be inside, by an estimate, and at the last.

It is the part of `gumbel_argmax` for such batches; shapes are its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.draw import TILE, draw, mass_above
from core_runner.sampling.kernels.group_maxima import (
    Groups,
    group_masses,
    is_top_p_alone,
    larger,
    load_row,
    log2_scale,
    weights,
)
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument
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


def new_ladder(num_rows: int, device: torch.device) -> Ladder:
    """Room for the ladders of `num_rows` rows."""
    ids = torch.empty((num_rows, RUNGS), dtype=torch.int32, device=device)
    logits = torch.empty_like(ids, dtype=torch.float32)
    return Ladder(ids, logits, torch.empty((num_rows, 2), dtype=torch.float32, device=device))


@triton.jit
def _is_inside(
    source,
    most,
    masses,
    holder_logits,
    num_groups,
    chosen,
    logit,
    peak,
    scale,
    need,
    top_p,
    PADDED,
    TILE,
    FEW,
) -> Any:
    """Whether the ids with larger logits have less mass than `need`: 1 if so, 0 if not, 2 likely, 3 perhaps."""
    is_above = most > logit
    inside = tl.full((), 1, tl.int32)
    # All ids of the groups that have one are an upper bound, and their largest ids a lower one.
    if tl.sum(tl.where(is_above, masses, 0.0), axis=0) >= need * _SURE:
        inside = tl.full((), 0, tl.int32)
        if tl.sum(tl.where(is_above, weights(most, peak, scale), 0.0), axis=0) * _SURE < need:
            if tl.sum(is_above.to(tl.int32), axis=0) <= FEW:
                mass = mass_above(source, most, chosen, logit, peak, scale, PADDED, TILE)
                inside = (mass < need).to(tl.int32)
            else:
                # The holders are as good as drawn at random: one of every 64 ids.
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
    slots,
    logits_indices,
    positions,
    temperatures,
    top_ks,
    top_ps,
    parameter_stride,
    seeds,
    seed_stride,
    maxima,
    other_bounds,
    holder_scores,
    holder_logits,
    sums,
    num_groups,
    thresholds,
    overlay,
    chosen,
    token_ids,
    failed,
    rung_ids,
    rung_logits,
    edge,
    purpose: tl.constexpr,
    RUNGS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
) -> None:
    """One row of a batch that filters."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * parameter_stride)
    top_k = tl.load(top_ks + slot * parameter_stride)
    top_p = tl.load(top_ps + slot * parameter_stride)
    seed = tl.load(seeds + slot * seed_stride)
    position = tl.load(positions + tl.load(logits_indices + row)) + 1
    threshold = tl.load(thresholds + row)
    source, chosen = (logits + row * logits_stride, row, vocab_size, overlay), chosen + row * num_groups
    rung_ids, rung_logits = rung_ids + row * RUNGS, rung_logits + row * RUNGS
    for rung in tl.static_range(RUNGS):
        tl.store(rung_ids + rung, -1)
        tl.store(rung_logits + rung, float("inf"))

    most = load_row(maxima, row, num_groups, PADDED)
    peak = tl.reduce(most, 0, larger)
    most = tl.where(peak != peak, -float("inf"), most)
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
            source,
            most,
            holder_scores,
            other_bounds,
            holder_logits,
            num_groups,
            chosen,
            above,
            threshold,
            temperature,
            seed,
            position,
            purpose,
            PADDED,
            TILE,
        )
        inside = tl.full((), 1, tl.int32)
        if climbs & (best > -float("inf")):
            inside = _is_inside(
                source,
                most,
                masses,
                holder_logits,
                num_groups,
                chosen,
                above,
                peak,
                scale,
                need,
                top_p,
                PADDED,
                TILE,
                FEW,
            )
            if (inside > 1) | ((inside == 1) & (num_rungs > 0)):
                tl.store(rung_ids + num_rungs, token_id)
                tl.store(rung_logits + num_rungs, above)
                num_rungs += 1
        goes_on = ((inside == 0) | ((inside == 3) & (num_rungs < RUNGS))).to(tl.int32)
    has_id = best > -float("inf")
    tl.store(token_ids + row, tl.where(has_id, token_id, 0).to(tl.int64))
    tl.store(failed + row, best == -float("inf"))


def filtered_argmax_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    thresholds: torch.Tensor,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    chosen: torch.Tensor,
    ladder: Ladder,
    overlay: Overlay | None,
) -> None:
    """One program for every row."""
    num_groups = groups.maxima.shape[1]
    stride = rows.temperature.stride(0)
    assert stride == rows.top_k.stride(0) == rows.top_p.stride(0)
    _filtered_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        rows.slots,
        rows.logits_indices,
        rows.positions,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        stride,
        rows.seed,
        rows.seed.stride(0),
        groups.maxima,
        groups.other_bounds,
        groups.holder_scores,
        groups.holder_logits,
        groups.sums,
        num_groups,
        thresholds,
        kernel_argument(overlay),
        chosen,
        token_ids,
        failed,
        *ladder,
        purpose=purpose,
        RUNGS=RUNGS,
        PADDED=triton.next_power_of_2(num_groups),
        TILE=TILE,
        FEW=_FEW,
        num_warps=LAUNCH.num_warps,
        maxnreg=LAUNCH.max_registers,
    )
