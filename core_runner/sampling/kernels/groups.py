"""What `group_maxima` leaves of a row by groups of 64 ids, and what the kernels after it do with that.

Of most rows few groups matter, and which they are is told by what the pass left: `collect` lists them, `load_groups`
reads their logits again. `source` is what that needs of a row: a pointer to its logits, its number, the size of the
vocabulary, and the kernel's overlay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.noise import GROUP
from core_runner.sampling.kernels.overlay import overlaid
from model_states.kernels.triton_import import tl, triton

PART = 64  # groups of one program of the pass
PART_VALUES = 4
LEAST_TEMPERATURE = (
    1e-30  # its inverse is finite; a smaller temperature leaves only the largest logits anyway
)
ROOM = 5e-7  # what rounding may add to a score, relative to its parts
_GROUP, _PART_VALUES = tl.constexpr(GROUP), tl.constexpr(PART_VALUES)
_ROOM = tl.constexpr(ROOM)
_LOG2_E, _LEAST = tl.constexpr(1.4426950408889634), tl.constexpr(LEAST_TEMPERATURE)


class Groups(NamedTuple):
    """One pass over a step's logits, by groups of ids. The last three are None where no row of the batch filters.

    So are the maxima, unless they are asked for: to write them takes a microsecond in 256 rows.
    """

    maxima: torch.Tensor | None
    other_bounds: torch.Tensor
    parts: torch.Tensor  # [n, PART_VALUES, parts of PART groups]
    holder_scores: torch.Tensor | None
    holder_logits: torch.Tensor | None
    sums: torch.Tensor | None


def num_groups(vocab_size: int) -> int:
    """Groups of a row, up to a multiple of 16, so that rows of them are read in full vectors; the last may be empty."""
    return -(-vocab_size // (16 * GROUP)) * 16


def new_groups(logits: torch.Tensor, vocab_size: int, filters: bool, maxima: bool = False) -> Groups:
    """Room for what `group_maxima` writes; maxima: whether they are asked for where no row filters."""
    num_rows, count = logits.shape[0], num_groups(vocab_size)
    bounds = logits.new_empty((num_rows, count), dtype=torch.float32)
    parts = logits.new_empty((num_rows, PART_VALUES, -(-count // PART)), dtype=torch.float32)
    # Not views of one tensor: Triton compiles anew for addresses that are not multiples of 16.
    of_groups = [torch.empty_like(bounds) if filters else None for _ in range(3)]
    return Groups(torch.empty_like(bounds) if filters or maxima else None, bounds, parts, *of_groups)


def groups_argument(groups: Groups) -> tuple[Any, ...]:
    """What kernels take apart again: `Groups`, and the number of groups and of parts of a row.

    The numbers are the vocabulary's, and compiled in: what vectors have after the last group then costs nothing.
    """
    return (*groups, tl.constexpr(groups.other_bounds.shape[1]), tl.constexpr(groups.parts.shape[2]))


@triton.jit
def log2_scale(temperature) -> Any:
    """What a difference of logits is multiplied by to make a power of two."""
    return _LOG2_E / tl.maximum(temperature, _LEAST)


@triton.jit
def weights(x, best, scale) -> Any:
    """exp((x - best) / T) for x <= best; 1 where both are the same infinity."""
    return tl.exp2(tl.minimum((x - best) * scale, 0.0))


@triton.jit
def larger(a, b) -> Any:
    """Maximum that is NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def score_bound(logit, noise) -> Any:
    """No less than the score of a logit with no more noise than that, which may round otherwise."""
    room = tl.where(logit > -float("inf"), (tl.abs(logit) + tl.abs(noise)) * _ROOM, 0.0)
    return logit + noise + room


@triton.jit
def better(score, token_id, logit, other_score, other_id, other_logit) -> Any:
    """The better of two scores, with its id and logit; of equal ones that of the lower id."""
    wins = (score > other_score) | ((score == other_score) & (token_id < other_id))
    return (
        tl.where(wins, score, other_score),
        tl.where(wins, token_id, other_id),
        tl.where(wins, logit, other_logit),
    )


@triton.jit
def better_part(peak, score, token_id, bound, other_peak, other_score, other_id, other_bound) -> Any:
    """What two parts have in common: larger logit, NaN if either is, better score with its id, larger bound."""
    wins = (score > other_score) | ((score == other_score) & (token_id < other_id))
    return (
        larger(peak, other_peak),
        tl.where(wins, score, other_score),
        tl.where(wins, token_id, other_id),
        tl.maximum(bound, other_bound),
    )


@triton.jit
def _load_parts(parts, row, part, num_parts) -> Any:
    """What some parts of a row have, as `better_part` takes it."""
    at, inside = parts + row * _PART_VALUES * num_parts + part, part < num_parts
    peaks = tl.load(at, mask=inside, other=-float("inf"))
    scores = tl.load(at + num_parts, mask=inside, other=-float("inf"))
    ids = tl.load(at + 2 * num_parts, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    return peaks, scores, ids, tl.load(at + 3 * num_parts, mask=inside, other=-float("inf"))


@triton.jit
def best_holder(groups, row, PARTS: tl.constexpr) -> Any:
    """A row's largest logit, the best score of its holders, its id, and a bound of all other scores.

    Score and bound are -inf if a logit is NaN. groups: as `groups_argument` gives them.
    """
    _, _, parts, _, _, _, _, num_parts = groups
    # As many at once as a warp has threads: every warp then has them all, and need not wait for the others.
    lane = tl.arange(0, 32)
    peaks, scores, ids, bounds = _load_parts(parts, row, lane, num_parts)
    for start in tl.static_range(32, PARTS, 32):
        peak, best, token_id, bound = _load_parts(parts, row, start + lane, num_parts)
        peaks, scores, ids, bounds = better_part(peaks, scores, ids, bounds, peak, best, token_id, bound)
    peak, best, token_id, bound = tl.reduce((peaks, scores, ids, bounds), 0, better_part)
    is_good = peak == peak
    return peak, tl.where(is_good, best, -float("inf")), token_id, tl.where(is_good, bound, -float("inf"))


@triton.jit
def load_row(values, row, num_groups, PADDED: tl.constexpr) -> Any:
    """What a row has for each of its groups, float32 [PADDED]; -inf for what is no group."""
    at = tl.arange(0, PADDED)
    return tl.load(values + row * num_groups + at, mask=at < num_groups, other=-float("inf"))


@triton.jit
def group_masses(sums, maxima, row, num_groups, best, scale, PADDED: tl.constexpr) -> Any:
    """Sum of the weights of each group's ids, float32 [PADDED]. maxima: as `load_row` gives them."""
    at = tl.arange(0, PADDED)
    part = tl.load(sums + row * num_groups + at, mask=at < num_groups, other=0.0)
    return part * weights(maxima, best, scale)


@triton.jit
def collect(chosen, keep, PADDED: tl.constexpr) -> Any:
    """Write the groups that `keep` [PADDED] marks side by side to `chosen`; returns their count."""
    # By fours, as a thread holds them: to count along single ones takes twice the instructions.
    kept = tl.reshape(keep.to(tl.int32), (PADDED // 4, 4))
    of_four = tl.sum(kept, axis=1)
    before = tl.cumsum(of_four, axis=0) - of_four
    place = before[:, None] + tl.cumsum(kept, axis=1) - 1
    tl.debug_barrier()  # what is there may still be being read
    tl.store(chosen + place, tl.reshape(tl.arange(0, PADDED), (PADDED // 4, 4)), mask=kept > 0)
    count = tl.sum(of_four, axis=0)  # while the list is on its way
    tl.debug_barrier()
    return count


@triton.jit
def load_groups(source, chosen, start, count, TILE: tl.constexpr) -> Any:
    """The chosen groups from `start` on, int32 [TILE], and their logits, float32 [TILE, GROUP], -inf after the last."""
    base, row, vocab_size, overlay = source
    place = start + tl.arange(0, TILE)
    groups = tl.load(chosen + place, mask=place < count, other=0)
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = (place < count)[:, None] & (ids < vocab_size)
    x = tl.load(base + ids, mask=inside, other=-float("inf")).to(tl.float32)
    return groups, tl.where(inside, overlaid(x, ids, None, row, vocab_size, overlay), -float("inf"))
