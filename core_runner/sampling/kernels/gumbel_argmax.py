"""Greedy and Gumbel-max sampling: the best id of every row of logits.

    score[row, id] = logit[row, id] + temperature[row] * gumbel(seed[row], position[row], id, purpose)
    token_ids[row] = lowest id of those with the largest score, among ids with logit >= threshold[row]

The argmax of `logit / T + gumbel` is that of `logit + T * gumbel`; the second never divides, so nothing
overflows however small T is, and T = 0 is greedy by the same formula. `failed[row]` is set, and
token_ids[row] is 0, where the logits hold a NaN or no id is left (all -inf).

Few groups of 64 ids are looked into. The holder of each group's largest noise has its score from `group_maxima`; the
best of those is the best of all, unless another id of a group whose bound reaches it is better. So all ids are scored
in those groups alone, and that of the highest bound comes first where they are many.

Where rows filter, `nucleus` wants to know what would be sampled if that id fell out, with all ids up to its logit, and
so on:

    ladder.ids[row, 0]     = token_ids[row],   ladder.logits[row, j] = the logit of ladder.ids[row, j]
    ladder.ids[row, j + 1] = the same choice among ids with logit > ladder.logits[row, j]
    ladder.logits[row, RUNGS] = the row's largest logit

for the rows that top-p alone filters; above the largest logit there are -1 and +inf, and in other rows from the first
rung on.

logits [n, >= vocab_size] (float32, bfloat16 or float16; rows may be strided), groups of them as `group_maxima` leaves
them, thresholds float32 [n] or None, token_ids int64 [n], failed bool [n], chosen: scratch, int32 like the groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.group_maxima import (
    Groups,
    collect,
    is_top_p_alone,
    load_groups,
    load_row,
    top_p_alone,
)
from core_runner.sampling.kernels.noise import GROUP, group_noise, gumbel_torch, gumbels
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

RUNGS = 3
TILE = 1024 // GROUP  # groups whose ids are scored together
_GROUP, _NO_ID = tl.constexpr(GROUP), tl.constexpr(2**31 - 1)


class Launch(NamedTuple):
    """How a row's program runs."""

    num_warps: int = 8
    max_registers: int | None = 128  # so that two programs, and so all rows of a large batch, run at once


LAUNCH = Launch()


class Ladder(NamedTuple):
    """What a row would sample, and what it would sample from the ids above that."""

    ids: torch.Tensor  # int32 [n, RUNGS]
    logits: torch.Tensor  # float32 [n, RUNGS + 1]


def new_ladder(num_rows: int, device: torch.device) -> Ladder:
    """Room for the ladders of `num_rows` rows."""
    ids = torch.empty((num_rows, RUNGS), dtype=torch.int32, device=device)
    return Ladder(ids, torch.empty((num_rows, RUNGS + 1), dtype=torch.float32, device=device))


def scores_torch(logits: torch.Tensor, vocab_size: int, rows: SamplingRows, purpose: int) -> torch.Tensor:
    """Every id's score, float32 [n, vocab_size]; noise is drawn for the rows alone that need it on a CPU."""
    scores = logits[:, :vocab_size].float()
    temperature, seed = rows.temperature[rows.slots], rows.seed[rows.slots]
    position = rows.sampled_positions()
    if scores.is_cuda:  # asking would wait for the device
        return scores + temperature[:, None] * gumbel_torch(seed, position, purpose, vocab_size)
    noisy = temperature > 0
    noise = gumbel_torch(seed[noisy], position[noisy], purpose, vocab_size)
    # Not in place: float32 logits are the caller's own memory here.
    return scores.index_put((noisy,), scores[noisy] + temperature[noisy, None] * noise)


def first_best_torch(scores: torch.Tensor) -> torch.Tensor:
    """The lowest id of those with the best score, int64 [n]; max() may give any of several equal ids."""
    return (scores == scores.amax(dim=1, keepdim=True)).to(torch.uint8).argmax(dim=1)


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
        ladder.logits[:, RUNGS] = x.amax(dim=1)
        for rung in range(RUNGS):
            logit = x.gather(1, ids[:, None])
            has_id = (scores.amax(dim=1) > -torch.inf) & top_p_alone(rows, vocab_size)
            ladder.ids[:, rung] = torch.where(has_id, ids, -1)
            ladder.logits[:, rung] = torch.where(has_id, logit[:, 0], torch.inf)
            scores = scores.masked_fill(x <= logit, -torch.inf)
            ids = first_best_torch(scores)


@triton.jit
def _better(best, token_id, logit, score, ids, x) -> Any:
    """The best of what there was and of new scores of ids with logits x, vectors; the lower id of equal ones."""
    top = tl.max(score, axis=0)
    top_id = tl.min(tl.where((score == top) & (score > -float("inf")), ids, _NO_ID), axis=0)
    top_logit = tl.max(tl.where(ids == top_id, x, -float("inf")), axis=0)
    wins = (top > best) | ((top == best) & (top_id < token_id))
    return tl.where(wins, top, best), tl.where(wins, top_id, token_id), tl.where(wins, top_logit, logit)


@triton.jit
def _score_groups(
    base, vocab_size, chosen, start, count, above, threshold, temperature, seed, position, purpose, TILE
) -> Any:
    """Best score, its id and logit in each of TILE of the chosen groups, vectors; -inf where there is none."""
    groups, x = load_groups(base, vocab_size, chosen, start, count, TILE)
    score = x
    if temperature > 0:
        score += temperature * gumbels(seed, position, groups, purpose, TILE)
    score = tl.where((x >= threshold) & (x > above), score, -float("inf"))
    best = tl.max(score, axis=1)
    # Not by the index of a reduction over x flattened: Triton 3.6 then numbers x as its threads hold it.
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    best_ids = tl.min(tl.where(score == best[:, None], ids, _NO_ID), axis=1)
    return best, best_ids, tl.max(tl.where(ids == best_ids[:, None], x, -float("inf")), axis=1)


@triton.jit
def load_scores(
    holder_scores,
    other_bounds,
    holder_logits,
    maxima,
    row,
    num_groups,
    threshold,
    HAS_LOGITS,
    PADDED: tl.constexpr,
) -> Any:
    """Scores of the row's holders, bounds of other ids, and the holders' logits, [PADDED]; maxima: likewise.

    -inf where the threshold drops them. HAS_LOGITS: whether there are logits of holders; else maxima take their place.
    """
    scores = load_row(holder_scores, row, num_groups, PADDED)
    bounds = load_row(other_bounds, row, num_groups, PADDED)
    held = maxima
    if HAS_LOGITS:
        held = load_row(holder_logits, row, num_groups, PADDED)
    is_open = (maxima >= threshold) & (maxima > -float("inf"))
    return (
        tl.where(is_open & (held >= threshold), scores, -float("inf")),
        tl.where(is_open, bounds, -float("inf")),
        held,
    )


@triton.jit
def draw(
    base,
    vocab_size,
    maxima,
    scores,
    bounds,
    held,
    chosen,
    above,
    threshold,
    temperature,
    seed,
    position,
    purpose: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Best score of a row among ids with logit > above and >= threshold, its lowest id, and that id's logit.

    A score of -inf, and any id and logit, where there is none. maxima and what `load_scores` gives [PADDED], of the
    row; chosen: scratch for as many groups.
    """
    at = tl.arange(0, PADDED)
    scores = tl.where(held > above, scores, -float("inf"))
    best = tl.max(scores, axis=0)
    group = tl.min(tl.where((scores == best) & (scores > -float("inf")), at, PADDED), axis=0)
    _, _, holder = group_noise(seed, position, group, purpose)
    token_id = tl.where(group < PADDED, group * _GROUP + holder, _NO_ID)
    logit = tl.max(tl.where(at == group, held, -float("inf")), axis=0)

    bounds = tl.where(maxima > above, bounds, -float("inf"))
    wanted = (bounds >= best) & (bounds > -float("inf"))
    top = tl.max(bounds, axis=0)
    first = tl.min(tl.where((bounds == top) & wanted, at, PADDED), axis=0)
    is_many = (tl.sum(wanted.to(tl.int32), axis=0) > TILE) | (temperature <= 0)
    # One group first, if there are many: what it gives leaves few. Without noise it has the answer.
    for step in range(tl.where(is_many, 0, 1), tl.where(temperature > 0, 2, 1)):
        if step == 0:
            count = tl.where(first < PADDED, 1, 0)
            tl.debug_barrier()  # what is there may still be being read
            tl.store(chosen, first, mask=first < PADDED)
            tl.debug_barrier()
        else:
            count = collect(chosen, wanted & (bounds >= best), PADDED)
        for start in range(0, count, TILE):
            score, ids, x = _score_groups(
                base,
                vocab_size,
                chosen,
                start,
                count,
                above,
                threshold,
                temperature,
                seed,
                position,
                purpose,
                TILE,
            )
            best, token_id, logit = _better(best, token_id, logit, score, ids, x)
    return best, token_id, logit


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
    num_groups,
    thresholds,
    chosen,
    token_ids,
    failed,
    rung_ids,
    rung_logits,
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
    has_nan = tl.max((most != most).to(tl.int32), axis=0) > 0
    most = tl.where(has_nan, -float("inf"), most)
    scores, bounds, held = load_scores(
        holder_scores, other_bounds, holder_logits, most, row, num_groups, threshold, FILTERS, PADDED
    )
    num_rungs = 1
    if FILTERS:
        top_k = tl.load(top_ks + slot * parameter_stride)
        top_p = tl.load(top_ps + slot * parameter_stride)
        has_ladder = is_top_p_alone(temperature, top_k, top_p, vocab_size)
        num_rungs = tl.where(has_ladder, RUNGS, 1)
        tl.store(rung_logits + row * (RUNGS + 1) + RUNGS, tl.max(most, axis=0))
    above = tl.full((), -float("inf"), tl.float32)
    for rung in range(0, num_rungs):
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
            has_rung = has_id & has_ladder
            above = tl.where(has_rung, logit, float("inf"))
            tl.store(rung_ids + row * RUNGS + rung, tl.where(has_rung, token_id, -1))
            tl.store(rung_logits + row * (RUNGS + 1) + rung, above)


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
        num_groups,
        thresholds,
        chosen,
        token_ids,
        failed,
        None if ladder is None else ladder.ids,
        None if ladder is None else ladder.logits,
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
