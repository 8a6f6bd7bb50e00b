"""Greedy and Gumbel-max sampling: the best id of every row of logits.

    score[row, id] = logit[row, id] + temperature[row] * gumbel(seed[row], position[row], id, purpose)
    token_ids[row] = lowest id of those with the largest score, among ids with logit >= threshold[row]

The argmax of `logit / T + gumbel` is that of `logit + T * gumbel`; the second never divides, so nothing
overflows however small T is, and T = 0 is greedy by the same formula. `failed[row]` is set, and
token_ids[row] is 0, where the logits hold a NaN or no id is left (all -inf).

Where rows filter, `nucleus` wants to know what would be sampled if that id fell out, with all ids up to its logit, and
so on:

    ladder.ids[row, 0]     = token_ids[row],   ladder.logits[row, j] = the logit of ladder.ids[row, j]
    ladder.ids[row, j + 1] = the same choice among ids with logit > ladder.logits[row, j]
    ladder.edge[row]       = the row's largest logit, and top_p * (sum over id of exp((logit - largest) / T))

for the rows that top-p alone filters. There are -1 and +inf above the largest logit, above a rung that is in the
nucleus for certain, because even all ids of the groups above it have less mass, and in other rows from the first rung.

logits [n, >= vocab_size] (float32, bfloat16 or float16; rows may be strided), groups of them as `group_maxima` leaves
them, thresholds float32 [n] or None, token_ids int64 [n], failed bool [n], chosen: scratch, int32 like the groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from core_runner.sampling.kernels.draw import TILE, draw, first_best_torch, load_scores, scores_torch
from core_runner.sampling.kernels.group_maxima import (
    LEAST_TEMPERATURE,
    Groups,
    group_masses,
    is_top_p_alone,
    larger,
    load_row,
    log2_scale,
    top_p_alone,
)
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

RUNGS = 3
_LEAST_NEED = 1e-30  # top_p may be too small for a float32; the best id is in the nucleus all the same
_NEED, _SURE = tl.constexpr(_LEAST_NEED), tl.constexpr(1 - 1e-5)


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


def gumbel_argmax_torch(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    thresholds: torch.Tensor | None,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    ladder: Ladder | None = None,
) -> None:
    """Plain torch twin."""
    x = logits[:, :vocab_size].float()
    failed.copy_(x.isnan().any(dim=1) | (x == -torch.inf).all(dim=1))
    scores = scores_torch(logits, vocab_size, rows, purpose)
    if thresholds is not None:
        scores = scores.masked_fill(x < thresholds[:, None], -torch.inf)
    ids = first_best_torch(scores)
    token_ids.copy_(ids.masked_fill(failed, 0))
    if ladder is not None:
        best, temperature = (
            x.amax(dim=1, keepdim=True),
            rows.temperature[rows.slots].clamp(min=LEAST_TEMPERATURE),
        )
        mass = (torch.where(x == best, 0.0, x - best) / temperature[:, None]).exp().sum(dim=1)
        ladder.edge[:, 0] = best[:, 0]
        ladder.edge[:, 1] = (rows.top_p[rows.slots] * mass).clamp(min=_LEAST_NEED)
        for rung in range(RUNGS):
            logit = x.gather(1, ids[:, None])
            has_id = (scores.amax(dim=1) > -torch.inf) & top_p_alone(rows, vocab_size)
            ladder.ids[:, rung] = torch.where(has_id, ids, -1)
            ladder.logits[:, rung] = torch.where(has_id, logit[:, 0], torch.inf)
            scores = scores.masked_fill(x <= logit, -torch.inf)
            ids = first_best_torch(scores)


@triton.jit
def _gumbel_argmax_kernel(
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
    holder_scores,
    other_bounds,
    holder_logits,
    sums,
    num_groups,
    thresholds,
    chosen,
    token_ids,
    failed,
    rung_ids,
    rung_logits,
    edge,
    purpose: tl.constexpr,
    FILTERS: tl.constexpr,
    RUNGS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * parameter_stride)
    seed = tl.load(seeds + slot * seed_stride)
    position = tl.load(positions + tl.load(logits_indices + row)) + 1
    threshold = tl.full((), -float("inf"), tl.float32)
    if FILTERS:
        threshold = tl.load(thresholds + row)
    base, chosen = logits + row * logits_stride, chosen + row * num_groups

    most = load_row(maxima, row, num_groups, PADDED)
    peak = tl.reduce(most, 0, larger)
    most = tl.where(peak != peak, -float("inf"), most)
    scores, bounds, held = load_scores(
        holder_scores, other_bounds, holder_logits, most, row, num_groups, threshold, FILTERS, PADDED
    )
    num_rungs = tl.full((), 1, tl.int32)
    if FILTERS:
        top_k = tl.load(top_ks + slot * parameter_stride)
        top_p = tl.load(top_ps + slot * parameter_stride)
        has_ladder = is_top_p_alone(temperature, top_k, top_p, vocab_size)
        for rung in tl.static_range(RUNGS):
            tl.store(rung_ids + row * RUNGS + rung, -1)
            tl.store(rung_logits + row * RUNGS + rung, float("inf"))
        masses, need = most, peak
        if has_ladder:
            num_rungs = tl.full((), RUNGS, tl.int32)
            masses = group_masses(sums, most, row, num_groups, peak, log2_scale(temperature), PADDED)
            need = tl.maximum(top_p * tl.sum(masses, axis=0), _NEED)
            tl.store(edge + row * 2, peak)
            tl.store(edge + row * 2 + 1, need)
    above = tl.full((), -float("inf"), tl.float32)
    rung = tl.full((), 0, tl.int32)
    while rung < num_rungs:
        best, token_id, logit = draw(
            base,
            vocab_size,
            most,
            scores,
            bounds,
            held,
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
        has_id = best > -float("inf")
        if rung == 0:
            tl.store(token_ids + row, tl.where(has_id, token_id, 0).to(tl.int64))
            tl.store(failed + row, best == -float("inf"))
        if FILTERS:
            if has_ladder & has_id:
                tl.store(rung_ids + row * RUNGS + rung, token_id)
                tl.store(rung_logits + row * RUNGS + rung, logit)
            above = logit
            is_inside = tl.sum(tl.where(most > above, masses, 0.0), axis=0) < need * _SURE
            num_rungs = tl.where(is_inside | (best == -float("inf")), 0, num_rungs)
        rung += 1


def gumbel_argmax_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    thresholds: torch.Tensor | None,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    chosen: torch.Tensor,
    ladder: Ladder | None = None,
    launch: Launch = LAUNCH,
) -> None:
    """One program for every row."""
    stride = rows.temperature.stride(0)
    assert stride == rows.top_k.stride(0) == rows.top_p.stride(0)
    assert (thresholds is None) == (ladder is None)
    num_groups = groups.maxima.shape[1]
    _gumbel_argmax_kernel[(logits.shape[0],)](
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
        groups.holder_scores,
        groups.other_bounds,
        groups.holder_logits,
        groups.sums,
        num_groups,
        thresholds,
        chosen,
        token_ids,
        failed,
        *(ladder or (None, None, None)),
        purpose=purpose,
        FILTERS=ladder is not None,
        RUNGS=RUNGS,
        PADDED=triton.next_power_of_2(num_groups),
        TILE=TILE,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )


def gumbel_argmax(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    thresholds: torch.Tensor | None,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    ladder: Ladder | None = None,
) -> None:
    """Fill `token_ids`, `failed` and `ladder` for every row of logits; see the module's formula and shapes."""
    if not use_triton(logits):
        gumbel_argmax_torch(logits, vocab_size, rows, purpose, thresholds, token_ids, failed, ladder)
        return
    chosen = torch.empty_like(groups.maxima, dtype=torch.int32)
    gumbel_argmax_triton(
        logits, vocab_size, rows, purpose, groups, thresholds, token_ids, failed, chosen, ladder
    )
