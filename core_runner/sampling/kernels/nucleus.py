"""Top-p without its threshold: the rungs of a row's ladder are tried until one lies in the nucleus.

    total         = sum over id of exp((logit[id] - best) / T)
    above(x)      = sum of the same over ids with logit > x
    token_ids[row] = the first of ladder.ids[row] with  above(its logit) < top_p * total

The nucleus is the set of ids for which that holds, ties included. If the best score of all ids is inside, it is the
best score of the nucleus; if not, no id up to its logit is inside either, and the next rung is the best of what is
left. So the id is exactly that which a threshold would give, and a threshold need not be found: the mass above all
rungs takes one look at the groups that have a logit above the first. A row whose ladder ends too early, about
(log(1 / top_p))^3 / 6 of the flattest rows, goes on alone, rung by rung.

Rows that top-p alone filters; others keep their token id. logits [n, >= vocab_size] (any float type, strided rows),
groups as `group_maxima` leaves them, thresholds float32 [n] and ladder as in `gumbel_argmax`, token_ids int64 [n],
masses: scratch, float32 [n, RUNGS, tiles], chosen: scratch, int32 like the groups.
"""

from __future__ import annotations

from typing import Any

import torch

from core_runner.sampling.kernels.draw import TILE, draw, first_best_torch, load_scores, scores_torch
from core_runner.sampling.kernels.group_maxima import (
    Groups,
    load_row,
    log2_scale,
    num_groups,
    top_p_alone,
    weights,
)
from core_runner.sampling.kernels.gumbel_argmax import RUNGS, Ladder
from core_runner.sampling.kernels.noise import GROUP
from core_runner.sampling.kernels.top_k_top_p import top_k_top_p_torch
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_TILE, _TILES = 4096 // GROUP, 8  # groups whose mass is summed together, and how often a program does that
_BLOCK = 4096  # ids of a row that goes on alone whose mass is summed together
_GROUP = tl.constexpr(GROUP)


def num_tiles(vocab_size: int) -> int:
    """Columns of `masses`."""
    return -(-num_groups(vocab_size) // (_TILE * _TILES)) * _TILES


def nucleus_torch(
    logits: torch.Tensor, vocab_size: int, rows: SamplingRows, purpose: int, token_ids: torch.Tensor
) -> None:
    """Plain torch twin, which finds the threshold."""
    thresholds = logits.new_empty(logits.shape[0], dtype=torch.float32)
    top_k_top_p_torch(logits, vocab_size, rows, True, thresholds)
    scores = scores_torch(logits, vocab_size, rows, purpose)
    scores = scores.masked_fill(logits[:, :vocab_size] < thresholds[:, None], -torch.inf)
    has_id = scores.amax(dim=1) > -torch.inf
    token_ids.copy_(torch.where(has_id & top_p_alone(rows, vocab_size), first_best_torch(scores), token_ids))


@triton.jit
def _masses_kernel(
    logits,
    logits_stride,
    vocab_size,
    slots,
    temperatures,
    parameter_stride,
    maxima,
    num_groups,
    rung_logits,
    edge,
    masses,
    RUNGS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """The mass above each rung of one row, in TILES tiles of its groups."""
    row = tl.program_id(0).to(tl.int64)
    rung_logits += row * RUNGS
    lowest = tl.load(rung_logits)
    if lowest == float("inf"):
        return
    scale = log2_scale(tl.load(temperatures + tl.load(slots + row).to(tl.int64) * parameter_stride))
    best = tl.load(edge + row * 2)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    for i in range(0, TILES):
        groups = (part * TILES + i) * TILE + tl.arange(0, TILE)
        most = tl.load(maxima + row * num_groups + groups, mask=groups < num_groups, other=-float("inf"))
        target = masses + (row * RUNGS * num_parts + part) * TILES + i
        if tl.max((most > lowest).to(tl.int32), axis=0) > 0:
            ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
            inside = (most > lowest)[:, None] & (ids < vocab_size)
            x = tl.load(logits + row * logits_stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
            weight = weights(x, best, scale)
            for rung in tl.static_range(RUNGS):
                above = tl.where(x > tl.load(rung_logits + rung), weight, 0.0)
                tl.store(target + rung * num_parts * TILES, tl.sum(tl.sum(above, axis=1), axis=0))
        else:
            for rung in tl.static_range(RUNGS):
                tl.store(target + rung * num_parts * TILES, 0.0)


@triton.jit
def _mass_above(base, vocab_size, above, best, scale, BLOCK: tl.constexpr) -> Any:
    """Weight of the logits > above in a whole row."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        x = tl.load(base + start + lane, mask=lane < vocab_size - start, other=-float("inf")).to(tl.float32)
        mass += tl.where(x > above, weights(x, best, scale), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _nucleus_kernel(
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
    maxima,
    holder_scores,
    other_bounds,
    holder_logits,
    num_groups,
    thresholds,
    rung_ids,
    rung_logits,
    edge,
    masses,
    num_tiles,
    chosen,
    token_ids,
    purpose: tl.constexpr,
    RUNGS: tl.constexpr,
    PADDED: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: its first rung inside the nucleus, or more rungs."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rung_ids + row * RUNGS) < 0:
        return
    best, need = tl.load(edge + row * 2), tl.load(edge + row * 2 + 1)
    tile = tl.arange(0, TILES)
    token_id, is_inside = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for rung in range(0, RUNGS):
        if is_inside == 0:
            mass = tl.load(masses + (row * RUNGS + rung) * num_tiles + tile, mask=tile < num_tiles, other=0.0)
            is_inside = (tl.sum(mass, axis=0) < need).to(tl.int32)
            token_id = tl.load(rung_ids + row * RUNGS + rung)
    if is_inside == 0:
        slot = tl.load(slots + row).to(tl.int64)
        temperature = tl.load(temperatures + slot * parameter_stride)
        scale = log2_scale(temperature)
        seed = tl.load(seeds + slot * seed_stride)
        position = tl.load(positions + tl.load(logits_indices + row)) + 1
        threshold = tl.load(thresholds + row)
        base, chosen = logits + row * logits_stride, chosen + row * num_groups
        most = load_row(maxima, row, num_groups, PADDED)
        scores, bounds, held = load_scores(
            holder_scores, other_bounds, holder_logits, most, row, num_groups, threshold, True, PADDED
        )
        above = tl.load(rung_logits + row * RUNGS + RUNGS - 1)
        while is_inside == 0:
            _, token_id, above = draw(
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
            is_inside = (_mass_above(base, vocab_size, above, best, scale, BLOCK) < need).to(tl.int32)
    tl.store(token_ids + row, token_id.to(tl.int64))


def _masses_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    groups: Groups,
    ladder: Ladder,
    masses: torch.Tensor,
) -> None:
    """One program for every tile of groups of every row."""
    _masses_kernel[(logits.shape[0], masses.shape[2] // _TILES)](
        logits,
        logits.stride(0),
        vocab_size,
        rows.slots,
        rows.temperature,
        rows.temperature.stride(0),
        groups.maxima,
        groups.maxima.shape[1],
        ladder.logits,
        ladder.edge,
        masses,
        RUNGS=RUNGS,
        TILE=_TILE,
        TILES=_TILES,
        num_warps=8,
    )


def nucleus_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    thresholds: torch.Tensor,
    ladder: Ladder,
    token_ids: torch.Tensor,
    masses: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Two launches: the mass above every rung, tile by tile, and the choice. Other rows leave both at once."""
    num_groups, tiles = groups.maxima.shape[1], masses.shape[2]
    _masses_triton(logits, vocab_size, rows, groups, ladder, masses)
    _nucleus_kernel[(logits.shape[0],)](
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
        groups.maxima,
        groups.holder_scores,
        groups.other_bounds,
        groups.holder_logits,
        num_groups,
        thresholds,
        *ladder,
        masses,
        tiles,
        chosen,
        token_ids,
        purpose=purpose,
        RUNGS=RUNGS,
        PADDED=triton.next_power_of_2(num_groups),
        TILES=triton.next_power_of_2(tiles),
        TILE=TILE,
        BLOCK=_BLOCK,
        num_warps=8,
        maxnreg=128,
    )


def nucleus(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    thresholds: torch.Tensor,
    ladder: Ladder,
    token_ids: torch.Tensor,
) -> None:
    """Change `token_ids` where they fall out of the nucleus; see the module's formula and shapes."""
    if not use_triton(logits):
        nucleus_torch(logits, vocab_size, rows, purpose, token_ids)
        return
    shape = (logits.shape[0], RUNGS, num_tiles(vocab_size))
    masses = logits.new_empty(shape, dtype=torch.float32)
    chosen = torch.empty_like(groups.maxima, dtype=torch.int32)
    nucleus_triton(logits, vocab_size, rows, purpose, groups, thresholds, ladder, token_ids, masses, chosen)
