"""What `gumbel_argmax` and `nucleus` share: the best score of a row among the ids above a logit, and its id.

    score[id] = logit[id] + T * gumbel(seed, position, id, purpose)

Few groups of 64 ids are looked into. The holder of each group's largest noise has its score from `group_maxima`; the
best of those is the best of all, unless another id of a group whose bound reaches it is better. So all ids are scored
in those groups alone, and that of the highest bound comes first where they are many.

logits, rows and groups are as in `gumbel_argmax`.
"""

from __future__ import annotations

from typing import Any

import torch

from core_runner.sampling.kernels.group_maxima import collect, load_groups, load_row, weights
from core_runner.sampling.kernels.noise import GROUP, group_noise, gumbels
from model_states.kernels.triton_import import tl, triton

TILE = 2048 // GROUP  # groups whose ids are scored together
_GROUP, _NO_ID = tl.constexpr(GROUP), tl.constexpr(2**31 - 1)


def first_best_torch(scores: torch.Tensor) -> torch.Tensor:
    """The lowest id of those with the best score, int64 [n]; max() may give any of several equal ids."""
    return (scores == scores.amax(dim=1, keepdim=True)).to(torch.uint8).argmax(dim=1)


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
    source, chosen, start, count, above, threshold, temperature, seed, position, purpose, TILE: tl.constexpr
) -> Any:
    """Best score, its id and logit in each of TILE of the chosen groups, vectors; -inf where there is none."""
    groups, x = load_groups(source, chosen, start, count, TILE)
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
def draw(
    source,
    maxima,
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
    purpose: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Best score of a row among ids with logit > above and >= threshold, its lowest id, and that id's logit.

    A score of -inf, and any id and logit, where there is none. source: as in `load_groups`; maxima [PADDED], of the
    row, -inf in what is no group; chosen: scratch for as many groups.
    """
    at, row = tl.arange(0, PADDED), source[1]
    is_open = (maxima >= threshold) & (maxima > above)
    best, token_id, logit = tl.full((), -float("inf"), tl.float32), tl.full((), _NO_ID, tl.int32), above
    if temperature > 0:
        held = load_row(holder_logits, row, num_groups, PADDED)
        scores = load_row(holder_scores, row, num_groups, PADDED)
        scores = tl.where(is_open & (held >= threshold) & (held > above), scores, -float("inf"))
        best = tl.max(scores, axis=0)
        group = tl.min(tl.where((scores == best) & (scores > -float("inf")), at, PADDED), axis=0)
        _, _, holder = group_noise(seed, position, group, purpose)
        token_id = tl.where(group < PADDED, group * _GROUP + holder, _NO_ID)
        logit = tl.max(tl.where(at == group, held, -float("inf")), axis=0)

    bounds = tl.where(is_open, load_row(other_bounds, row, num_groups, PADDED), -float("inf"))
    return look_into_groups(
        source,
        bounds,
        best,
        token_id,
        logit,
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


@triton.jit
def look_into_groups(
    source,
    bounds,
    best,
    token_id,
    logit,
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
    """What `draw` gives, from the best of the holders and the bounds of other ids, [PADDED], -inf in closed groups."""
    at = tl.arange(0, PADDED)
    wanted = (bounds >= best) & (bounds > -float("inf"))
    is_many = (tl.sum(wanted.to(tl.int32), axis=0) > TILE) | (temperature <= 0)
    # One group first, if there are many: what it gives leaves few. Without noise it has the answer.
    for step in range(tl.where(is_many, 0, 1), tl.where(temperature > 0, 2, 1)):
        if step == 0:
            top = tl.max(bounds, axis=0)
            first = tl.min(tl.where((bounds == top) & wanted, at, PADDED), axis=0)
            count = tl.where(first < PADDED, 1, 0)
            tl.debug_barrier()  # what is there may still be being read
            tl.store(chosen, first, mask=first < PADDED)
            tl.debug_barrier()
        else:
            count = collect(chosen, wanted & (bounds >= best), PADDED)
        for start in range(0, count, TILE):
            score, ids, x = _score_groups(
                source,
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
def mass_above(source, maxima, chosen, above, best, scale, PADDED: tl.constexpr, TILE: tl.constexpr) -> Any:
    """Sum of the weights of the logits > above of a row, of which some groups have one; arguments as of `draw`."""
    count = collect(chosen, maxima > above, PADDED)
    masses = tl.zeros((TILE, _GROUP), tl.float32)
    for start in range(0, count, TILE):
        _, x = load_groups(source, chosen, start, count, TILE)
        masses += tl.where(x > above, weights(x, best, scale), 0.0)
    return tl.sum(tl.sum(masses, axis=1), axis=0)
