"""What `gumbel_argmax` and `nucleus` share: the best score of a row among the ids above a logit, and its id.

    score[id] = logit[id] + T * gumbel(seed, position, id, purpose)        T > 0

Few groups of 64 ids are looked into. The holder of each group's largest noise has its score from `group_maxima`; the
best of those is the best of all, unless another id of a group whose bound reaches it is better. Nor can the best score
be less than the largest logit with the least noise there is. So the other ids are looked at in the groups alone whose
bound reaches both: some twenty if few ids lead, and hardly any if none does. There every id has a bound of its own, in
a few instructions; of a group mostly one reaches the best, so ids are scored by rank of their bounds.

`source` as in `groups`, `key` = (temperature, seed, position) of a row, `chosen`: scratch for as many int32 as a row
has groups; logits and rows as in `gumbel_argmax`.
"""

from __future__ import annotations

from typing import Any

import torch

from core_runner.sampling.kernels.groups import ROOM, better, collect, load_groups, load_row, weights
from core_runner.sampling.kernels.noise import (
    GROUP,
    LEAST_GUMBEL,
    group_noise,
    gumbel_of_other,
    id_words,
    least_of_others,
    most_gumbel_of_other,
)
from model_states.kernels.triton_import import tl, triton

TILE = 1024 // GROUP  # groups that are looked into together
_GROUP, _LEAST_GUMBEL, _ROOM = tl.constexpr(GROUP), tl.constexpr(LEAST_GUMBEL), tl.constexpr(ROOM)


def first_best_torch(scores: torch.Tensor) -> torch.Tensor:
    """The lowest id of those with the best score, int64 [n]; max() may give any of several equal ids."""
    return (scores == scores.amax(dim=1, keepdim=True)).to(torch.uint8).argmax(dim=1)


@triton.jit
def _two_farthest(
    reach, token_id, word, logit, next_reach, other_reach, other_id, other_word, other_logit, other_next
) -> Any:
    """Of some ids the one that reaches farthest, the lowest of several, and how far the next one reaches."""
    wins = (reach > other_reach) | ((reach == other_reach) & (token_id < other_id))
    less = tl.where(wins, other_reach, reach)
    return (
        tl.where(wins, reach, other_reach),
        tl.where(wins, token_id, other_id),
        tl.where(wins, word, other_word),
        tl.where(wins, logit, other_logit),
        tl.maximum(less, tl.maximum(next_reach, other_next)),
    )


@triton.jit
def _better_and_reach(score, token_id, logit, reach, other_score, other_id, other_logit, other_reach) -> Any:
    """The better of two scores, with its id and logit, and the farther reach of other ids."""
    score, token_id, logit = better(score, token_id, logit, other_score, other_id, other_logit)
    return score, token_id, logit, tl.maximum(reach, other_reach)


@triton.jit
def _better_others(
    source, key, chosen, start, count, best, above, threshold, purpose: tl.constexpr, TILE: tl.constexpr
) -> Any:
    """The better of `best`, a score, its id and logit, and of all ids but the holders in TILE of the chosen groups."""
    score, token_id, logit = best
    temperature, seed, position = key
    groups, x = load_groups(source, chosen, start, count, TILE)
    least, gap, holder = group_noise(seed, position, groups, purpose)
    words = id_words(seed, position, groups, purpose, TILE)
    least_other = least_of_others(words, holder)
    most_noise = most_gumbel_of_other(words, least[:, None], gap[:, None], least_other[:, None])
    lane = tl.arange(0, _GROUP)[None, :]
    ids, is_open = groups[:, None] * _GROUP + lane, (x >= threshold) & (x > above) & (lane != holder[:, None])
    reach = tl.where(is_open, (x + tl.abs(x) * _ROOM) + temperature * most_noise, -float("inf"))
    nothing, goes_on = tl.full(x.shape, -float("inf"), tl.float32), tl.full((), 1, tl.int32)
    # Of each group the id that is likely the best is scored, and seldom another.
    while goes_on > 0:
        far, far_ids, far_words, far_x, next_reach = tl.reduce(
            (reach, ids, words, x, nothing), 1, _two_farthest
        )
        scores = far_x + temperature * gumbel_of_other(far_words, least, gap, least_other)
        scores = tl.where(far > -float("inf"), scores, -float("inf"))
        other, other_id, other_logit, next_reach = tl.reduce(
            (scores, far_ids, far_x, next_reach), 0, _better_and_reach
        )
        score, token_id, logit = better(score, token_id, logit, other, other_id, other_logit)
        reach = tl.where(ids == far_ids[:, None], -float("inf"), reach)
        goes_on = ((next_reach >= score) & (next_reach > -float("inf"))).to(tl.int32)
    return score, token_id, logit


@triton.jit
def draw(
    source,
    key,
    groups,
    maxima,
    chosen,
    above,
    threshold,
    purpose: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Best score of a row among ids with logit > above and >= threshold, its lowest id, and that id's logit.

    A score of -inf, and any id and logit, where there is none. groups: as `groups_argument` gives them; maxima
    [PADDED]: of the row, -inf in what is no group.
    """
    _, other_bounds, _, holder_scores, holder_logits, _, num_groups, _ = groups
    row, at = source[1], tl.arange(0, PADDED)
    held = load_row(holder_logits, row, num_groups, PADDED)
    scores = load_row(holder_scores, row, num_groups, PADDED)
    bounds = load_row(other_bounds, row, num_groups, PADDED)
    is_open = (maxima >= threshold) & (maxima > above)
    scores = tl.where(is_open & (held >= threshold) & (held > above), scores, -float("inf"))
    best, group, logit = tl.reduce((scores, at, held), 0, better)
    _, _, holder = group_noise(key[1], key[2], group, purpose)
    best_of_all = best, group * _GROUP + holder, logit
    bounds = tl.where(is_open, bounds, -float("inf"))
    largest = tl.max(tl.where(is_open, maxima, -float("inf")), axis=0)
    return look_into_groups(
        source, key, bounds, largest, best_of_all, chosen, above, threshold, purpose, PADDED, TILE
    )


@triton.jit
def look_into_groups(
    source,
    key,
    bounds,
    largest,
    holder,
    chosen,
    above,
    threshold,
    purpose: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """What `draw` gives, from the bounds of other ids than holders [PADDED], the largest logit, and the best holder.

    Groups without an id above the logits asked for have bounds of -inf, and no part in the largest logit. holder: its
    score, id and logit.
    """
    best, token_id, logit = holder
    least = tl.maximum(best, largest + key[0] * _LEAST_GUMBEL)
    count = collect(chosen, (bounds >= least) & (bounds > -float("inf")), PADDED)
    for start in range(0, count, TILE):
        best, token_id, logit = _better_others(
            source, key, chosen, start, count, (best, token_id, logit), above, threshold, purpose, TILE
        )
    return best, token_id, logit


@triton.jit
def mass_above(source, maxima, chosen, above, best, scale, PADDED: tl.constexpr, TILE: tl.constexpr) -> Any:
    """Sum of the weights of the logits > above of a row, of which some groups have one; maxima: as of `draw`."""
    count = collect(chosen, maxima > above, PADDED)
    masses = tl.zeros((TILE, _GROUP), tl.float32)
    for start in range(0, count, TILE):
        _, x = load_groups(source, chosen, start, count, TILE)
        masses += tl.where(x > above, weights(x, best, scale), 0.0)
    return tl.sum(masses)
