"""What one pass over the logits leaves of every group of 64 ids: what the kernels after it decide by.

    maxima[row, g]         = max over the ids of group g of logit[row, id]            NaN if one of them is
    holder_scores[row, g]  = logit[row, h] + T * its noise,   h = 64 * g + holder[g]         see `noise`
    other_bounds[row, g]   = maxima[row, g] + T * -log(least[g] + gap[g]), or a little more
    holder_logits[row, g]  = logit[row, h]
    sums[row, g]           = sum over the group of exp((logit[row, id] - maxima[row, g]) / T)

The holder has the largest noise of its group, and no other id's score is above the group's bound. Greedy rows have no
noise: their holder_scores are -inf, and other_bounds the maxima. `holder_logits` and `sums` are there if rows filter,
the first for rows that are not greedy, the second for rows that top-p filters without top-k; elsewhere it is garbage.

logits [n, >= vocab_size] (any float type, strided rows); all results float32 [n, num_groups(vocab_size)].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.noise import GROUP, group_noise, group_noise_torch
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_GROUP = tl.constexpr(GROUP)
_ROOM = tl.constexpr(5e-7)  # what rounding may add to a score, relative to its parts
_LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_TEMPERATURE = (
    1e-30  # its inverse is finite; a smaller temperature leaves only the largest logits anyway
)
_LEAST = tl.constexpr(LEAST_TEMPERATURE)


class Groups(NamedTuple):
    """One pass over a step's logits, by groups of ids. The last two are None where no row of the batch filters."""

    maxima: torch.Tensor
    holder_scores: torch.Tensor
    other_bounds: torch.Tensor
    holder_logits: torch.Tensor | None
    sums: torch.Tensor | None


class Launch(NamedTuple):
    """How the pass is cut: groups of one program, and its warps."""

    groups: int = 4096 // GROUP
    num_warps: int = 4


LAUNCH = Launch()


def num_groups(vocab_size: int) -> int:
    """Groups of a row, up to a multiple of 16, so that rows of them are read in full vectors; the last may be empty."""
    return -(-vocab_size // (16 * GROUP)) * 16


def new_groups(logits: torch.Tensor, vocab_size: int, filters: bool) -> Groups:
    """Room for what `group_maxima` writes."""
    maxima = logits.new_empty((logits.shape[0], num_groups(vocab_size)), dtype=torch.float32)
    # Not views of one tensor: Triton compiles anew for addresses that are not multiples of 16.
    scores, bounds = torch.empty_like(maxima), torch.empty_like(maxima)
    if not filters:
        return Groups(maxima, scores, bounds, None, None)
    return Groups(maxima, scores, bounds, torch.empty_like(maxima), torch.empty_like(maxima))


def top_p_alone(rows: SamplingRows, vocab_size: int) -> torch.Tensor:
    """Rows whose ids are filtered by top-p and not by top-k, bool [n]."""
    top_k, top_p = rows.top_k[rows.slots], rows.top_p[rows.slots]
    return (rows.temperature[rows.slots] > 0) & (top_p < 1) & ((top_k <= 0) | (top_k >= vocab_size))


def group_maxima_torch(
    logits: torch.Tensor, vocab_size: int, rows: SamplingRows, purpose: int, groups: Groups
) -> None:
    """Plain torch twin."""
    x = logits[:, :vocab_size].float()
    count = groups.maxima.shape[1]
    x = torch.nn.functional.pad(x, (0, count * GROUP - vocab_size), value=-torch.inf).unflatten(
        1, (-1, GROUP)
    )
    groups.maxima.copy_(x.amax(dim=2))
    temperature = rows.temperature[rows.slots][:, None]
    least, gap, holder = group_noise_torch(rows.seed[rows.slots], rows.sampled_positions(), purpose, count)
    held = x.gather(2, holder[:, :, None])[:, :, 0]
    groups.holder_scores.copy_(torch.where(temperature > 0, held - temperature * least.log(), -torch.inf))
    groups.other_bounds.copy_(groups.maxima - temperature * (least + gap).log())
    if groups.sums is not None and groups.holder_logits is not None:
        groups.holder_logits.copy_(held)
        difference = torch.where(x == groups.maxima[:, :, None], 0.0, x - groups.maxima[:, :, None])
        scaled = difference / temperature.clamp(min=LEAST_TEMPERATURE)[:, :, None]
        groups.sums.copy_(scaled.exp().sum(dim=2))


@triton.jit
def is_top_p_alone(temperature, top_k, top_p, vocab_size) -> Any:
    """Whether top-p filters a row's ids and top-k does not."""
    return (temperature > 0) & (top_p < 1) & ((top_k <= 0) | (top_k >= vocab_size))


@triton.jit
def log2_scale(temperature) -> Any:
    """What a difference of logits is multiplied by to make a power of two."""
    return _LOG2_E / tl.maximum(temperature, _LEAST)


@triton.jit
def weights(x, best, scale) -> Any:
    """exp((x - best) / T) for x <= best; 1 where both are the same infinity."""
    return tl.exp2(tl.minimum((x - best) * scale, 0.0))


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
    kept = keep.to(tl.int32)
    count = tl.sum(kept, axis=0)
    if count > 0:
        tl.debug_barrier()  # what is there may still be being read
        tl.store(chosen + tl.cumsum(kept, axis=0) - 1, tl.arange(0, PADDED), mask=keep)
        tl.debug_barrier()
    return count


@triton.jit
def load_groups(base, vocab_size, chosen, start, count, TILE: tl.constexpr) -> Any:
    """The chosen groups from `start` on, int32 [TILE], and their logits, float32 [TILE, GROUP], -inf after the last."""
    place = start + tl.arange(0, TILE)
    groups = tl.load(chosen + place, mask=place < count, other=0)
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = (place < count)[:, None] & (ids < vocab_size)
    return groups, tl.load(base + ids, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def larger(a, b) -> Any:
    """Maximum that is NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _group_maxima_kernel(
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
    purpose: tl.constexpr,
    FILTERS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """GROUPS groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    groups = first + tl.arange(0, GROUPS)
    base, at, is_group = logits + row * logits_stride, row * num_groups + groups, groups < num_groups
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(base + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * parameter_stride)
    seed = tl.load(seeds + slot * seed_stride)
    position = tl.load(positions + tl.load(logits_indices + row)) + 1
    most = tl.reduce(x, 1, larger)
    tl.store(maxima + at, most, mask=is_group)
    if FILTERS:
        top_k = tl.load(top_ks + slot * parameter_stride)
        top_p = tl.load(top_ps + slot * parameter_stride)
        if is_top_p_alone(temperature, top_k, top_p, vocab_size):
            weight = weights(x, most[:, None], log2_scale(temperature))
            tl.store(sums + at, tl.sum(weight, axis=1), mask=is_group)
    if temperature > 0:
        # Read back, each by one thread: several hold a group's maximum, and all would draw its noise.
        tl.debug_barrier()
        peak = tl.load(maxima + at, mask=is_group, other=-float("inf"))
        least, gap, holder = group_noise(seed, position, groups, purpose)
        held = groups * _GROUP + holder
        logit = tl.load(base + held, mask=is_group & (held < vocab_size), other=-float("inf")).to(tl.float32)
        noise = -temperature * tl.log(least + gap)
        # What scores an id may round its sum otherwise.
        room = tl.where(peak > -float("inf"), (tl.abs(peak) + tl.abs(noise)) * _ROOM, 0.0)
        tl.store(holder_scores + at, logit - temperature * tl.log(least), mask=is_group)
        tl.store(other_bounds + at, peak + noise + room, mask=is_group)
        if FILTERS:
            tl.store(holder_logits + at, logit, mask=is_group)
    else:
        tl.store(holder_scores + at, -float("inf"), mask=is_group)
        tl.store(other_bounds + at, most, mask=is_group)


def group_maxima_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    launch: Launch = LAUNCH,
) -> None:
    """One program for every `launch.groups` groups of every row."""
    stride = rows.temperature.stride(0)
    assert stride == rows.top_k.stride(0) == rows.top_p.stride(0)
    _group_maxima_kernel[(logits.shape[0], triton.cdiv(groups.maxima.shape[1], launch.groups))](
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
        *groups,
        groups.maxima.shape[1],
        purpose=purpose,
        FILTERS=groups.sums is not None,
        GROUPS=launch.groups,
        num_warps=launch.num_warps,
    )


def group_maxima(
    logits: torch.Tensor, vocab_size: int, rows: SamplingRows, purpose: int, groups: Groups
) -> None:
    """Fill `groups` for every row of logits; see the module's formula and shapes."""
    run = group_maxima_triton if use_triton(logits) else group_maxima_torch
    run(logits, vocab_size, rows, purpose, groups)
