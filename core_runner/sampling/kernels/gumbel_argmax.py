"""Greedy and Gumbel-max sampling: the best id of every row of logits.

    score[row, id] = logit[row, id] + temperature[row] * gumbel(seed[row], position[row], id, purpose)
    token_ids[row] = lowest id of those with the largest score, among ids with logit >= threshold[row]

The argmax of `logit / T + gumbel` is that of `logit + T * gumbel`; the second never divides, so nothing
overflows however small T is, and T = 0 is greedy by the same formula. `failed[row]` is set, and
token_ids[row] is 0, where the logits hold a NaN or no id is left (all -inf).

The holder of each group's largest noise has its score from `group_maxima`, and each part of a row the best of those.
The best of them all is the answer, unless a bound of other ids reaches it; `draw` looks into the groups where one does.

Where rows filter, those that top-p alone filters may leave the decision to `nucleus`, by a `ladder`.

logits [n, >= vocab_size] (float32, bfloat16 or float16; rows may be strided), what lies over them, groups of them as
`group_maxima` leaves them, thresholds float32 [n] or None, token_ids int64 [n], failed bool [n], chosen: scratch, int32
like the groups.
"""

from __future__ import annotations

from typing import Any

import torch

from core_runner.sampling.kernels.draw import TILE, first_best_torch, look_into_groups
from core_runner.sampling.kernels.group_maxima import (
    LEAST_TEMPERATURE,
    PART_VALUES,
    Groups,
    larger,
    load_row,
    scores_torch,
    top_p_alone,
)
from core_runner.sampling.kernels.ladder import LEAST_NEED, RUNGS, Ladder, Launch, filtered_argmax_triton
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument, overlaid_torch
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton

_NO_ID, _PART_VALUES = tl.constexpr(2**31 - 1), tl.constexpr(PART_VALUES)

LAUNCH = Launch()


def gumbel_argmax_torch(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    thresholds: torch.Tensor | None,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    ladder: Ladder | None = None,
    overlay: Overlay | None = None,
) -> None:
    """Plain torch twin."""
    logits = overlaid_torch(logits, vocab_size, overlay)
    x = logits.float()
    failed.copy_(x.isnan().any(dim=1) | (x == -torch.inf).all(dim=1))
    scores = scores_torch(logits, rows, purpose)
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
        ladder.edge[:, 1] = (rows.top_p[rows.slots] * mass).clamp(min=LEAST_NEED)
        for rung in range(RUNGS):
            logit = x.gather(1, ids[:, None])
            has_id = (scores.amax(dim=1) > -torch.inf) & top_p_alone(rows, vocab_size)
            ladder.ids[:, rung] = torch.where(has_id, ids, -1)
            ladder.logits[:, rung] = torch.where(has_id, logit[:, 0], torch.inf)
            scores = scores.masked_fill(x <= logit, -torch.inf)
            ids = first_best_torch(scores)


@triton.jit
def _best_holder(parts, row, num_parts, PARTS: tl.constexpr) -> Any:
    """The best score of a row's holders, its lowest id, and a bound of all other scores; -inf if a logit is NaN."""
    part = tl.arange(0, PARTS)
    at, inside = parts + row * _PART_VALUES * num_parts + part, part < num_parts
    peaks = tl.load(at, mask=inside, other=-float("inf"))
    scores = tl.load(at + num_parts, mask=inside, other=-float("inf"))
    ids = tl.load(at + 2 * num_parts, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    bounds = tl.load(at + 3 * num_parts, mask=inside, other=-float("inf"))
    peak = tl.reduce(peaks, 0, larger)
    best = tl.where(peak == peak, tl.max(scores, axis=0), -float("inf"))
    token_id = tl.min(tl.where((scores == best) & (scores > -float("inf")), ids, _NO_ID), axis=0)
    return best, token_id, tl.where(peak == peak, tl.max(bounds, axis=0), -float("inf"))


@triton.jit
def _plain_kernel(
    logits,
    logits_stride,
    vocab_size,
    slots,
    logits_indices,
    positions,
    temperatures,
    parameter_stride,
    seeds,
    seed_stride,
    other_bounds,
    parts,
    num_groups,
    num_parts,
    overlay,
    chosen,
    token_ids,
    failed,
    purpose: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row of a batch that does not filter."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * parameter_stride)
    seed = tl.load(seeds + slot * seed_stride)
    position = tl.load(positions + tl.load(logits_indices + row)) + 1
    if PDL:
        gdc_wait()
    best, token_id, bound = _best_holder(parts, row, num_parts, PARTS)
    if (bound >= best) & (bound > -float("inf")):
        nothing = tl.full((), -float("inf"), tl.float32)
        best, token_id, _ = look_into_groups(
            (logits + row * logits_stride, row, vocab_size, overlay),
            load_row(other_bounds, row, num_groups, PADDED),
            best,
            token_id,
            nothing,
            chosen + row * num_groups,
            nothing,
            nothing,
            temperature,
            seed,
            position,
            purpose,
            PADDED,
            TILE,
        )
    tl.store(token_ids + row, tl.where(best > -float("inf"), token_id, 0).to(tl.int64))
    tl.store(failed + row, best == -float("inf"))


def _plain_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    chosen: torch.Tensor,
    overlay: Overlay | None,
) -> None:
    """One program for every row, which is there before the pass over the logits has ended."""
    num_groups, num_parts = groups.maxima.shape[1], groups.parts.shape[2]
    _plain_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        rows.slots,
        rows.logits_indices,
        rows.positions,
        rows.temperature,
        rows.temperature.stride(0),
        rows.seed,
        rows.seed.stride(0),
        groups.other_bounds,
        groups.parts,
        num_groups,
        num_parts,
        kernel_argument(overlay),
        chosen,
        token_ids,
        failed,
        purpose=purpose,
        PADDED=triton.next_power_of_2(num_groups),
        PARTS=triton.next_power_of_2(num_parts),
        TILE=TILE,
        num_warps=LAUNCH.num_warps,
        maxnreg=LAUNCH.max_registers,
        **programmatic_launch(logits),
    )


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
    overlay: Overlay | None = None,
) -> None:
    """One program for every row."""
    if ladder is None:
        assert thresholds is None
        _plain_triton(logits, vocab_size, rows, purpose, groups, token_ids, failed, chosen, overlay)
        return
    assert thresholds is not None
    filtered_argmax_triton(
        logits, vocab_size, rows, purpose, groups, thresholds, token_ids, failed, chosen, ladder, overlay
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
    overlay: Overlay | None = None,
) -> None:
    """Fill `token_ids`, `failed` and `ladder` for every row of logits; see the module's formula and shapes."""
    if not use_triton(logits):
        gumbel_argmax_torch(logits, vocab_size, rows, purpose, thresholds, token_ids, failed, ladder, overlay)
        return
    chosen = torch.empty_like(groups.maxima, dtype=torch.int32)
    gumbel_argmax_triton(
        logits, vocab_size, rows, purpose, groups, thresholds, token_ids, failed, chosen, ladder, overlay
    )
