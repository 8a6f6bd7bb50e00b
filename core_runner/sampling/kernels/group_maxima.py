"""What one pass over the logits leaves of every group of 64 ids and of every part of 64 groups: what decides after it.

    maxima[row, g]         = max over the ids of group g of logit[row, id]            NaN if one of them is
    parts[row, :, p]       = largest of the maxima of part p, NaN if one is; of its holder_scores; the lowest id with
                             that score, in the same bits; largest of its other_bounds
    holder_scores[row, g]  = logit[row, h] + T * its noise,   h = 64 * g + holder[g]         see `noise`
    other_bounds[row, g]   = maxima[row, g] + T * -log(least[g] + gap[g]), or a little more
    holder_logits[row, g]  = logit[row, h]
    sums[row, g]           = sum over the group of exp((logit[row, id] - maxima[row, g]) / T)

The holder has the largest noise of its group, and no other id's score is above the group's bound. Greedy rows have no
noise: their holder_scores are -inf, and other_bounds the maxima; but parts have the score of their best id, the lowest
of several, and -inf for the bound. The last three are there if rows filter, `holder_logits` for rows that are not
greedy, `sums` for rows that top-p filters without top-k; elsewhere they are garbage.

logits [n, >= vocab_size] (any float type, strided rows), and what lies over them; results float32,
[n, num_groups(vocab_size)] by groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.noise import GROUP, group_noise_torch, gumbel_torch, pair_noise
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument, overlaid, overlaid_torch
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, programmatic_launch
from model_states.kernels.triton_import import tl, triton

_GROUP = tl.constexpr(GROUP)
_ROOM = tl.constexpr(5e-7)  # what rounding may add to a score, relative to its parts
_LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_TEMPERATURE = (
    1e-30  # its inverse is finite; a smaller temperature leaves only the largest logits anyway
)
_LEAST = tl.constexpr(LEAST_TEMPERATURE)


class Groups(NamedTuple):
    """One pass over a step's logits, by groups of ids. The last three are None where no row of the batch filters."""

    maxima: torch.Tensor
    other_bounds: torch.Tensor
    parts: torch.Tensor  # [n, PART_VALUES, parts of PART groups]
    holder_scores: torch.Tensor | None
    holder_logits: torch.Tensor | None
    sums: torch.Tensor | None


PART = 64  # groups of one program
PART_VALUES = 4


class Launch(NamedTuple):
    """How a program runs that reads 16-bit logits; with 32 bits it has twice the warps."""

    num_warps: int
    max_registers: int | None


PLAIN = Launch(1, None)
WITH_MORE = Launch(1, 168)  # filters or an overlay: twelve programs at once on an H200's multiprocessor

_NO_ID, _PART_VALUES = tl.constexpr(2**31 - 1), tl.constexpr(PART_VALUES)


def num_groups(vocab_size: int) -> int:
    """Groups of a row, up to a multiple of 16, so that rows of them are read in full vectors; the last may be empty."""
    return -(-vocab_size // (16 * GROUP)) * 16


def new_groups(logits: torch.Tensor, vocab_size: int, filters: bool) -> Groups:
    """Room for what `group_maxima` writes."""
    num_rows, count = logits.shape[0], num_groups(vocab_size)
    maxima = logits.new_empty((num_rows, count), dtype=torch.float32)
    # Not views of one tensor: Triton compiles anew for addresses that are not multiples of 16.
    bounds = torch.empty_like(maxima)
    parts = logits.new_empty((num_rows, PART_VALUES, -(-count // PART)), dtype=torch.float32)
    if not filters:
        return Groups(maxima, bounds, parts, None, None, None)
    return Groups(maxima, bounds, parts, *(torch.empty_like(maxima) for _ in range(3)))


def top_p_alone(rows: SamplingRows, vocab_size: int) -> torch.Tensor:
    """Rows whose ids are filtered by top-p and not by top-k, bool [n]."""
    top_k, top_p = rows.top_k[rows.slots], rows.top_p[rows.slots]
    return (rows.temperature[rows.slots] > 0) & (top_p < 1) & ((top_k <= 0) | (top_k >= vocab_size))


def group_maxima_torch(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    overlay: Overlay | None = None,
) -> None:
    """Plain torch twin."""
    x = overlaid_torch(logits, vocab_size, overlay).float()
    count = groups.maxima.shape[1]
    x = torch.nn.functional.pad(x, (0, count * GROUP - vocab_size), value=-torch.inf).unflatten(
        1, (-1, GROUP)
    )
    groups.maxima.copy_(x.amax(dim=2))
    temperature = rows.temperature[rows.slots][:, None]
    least, gap, holder = group_noise_torch(rows.seed[rows.slots], rows.sampled_positions(), purpose, count)
    held = x.gather(2, holder[:, :, None])[:, :, 0]
    scores = torch.where(temperature > 0, held - temperature * least.log(), -torch.inf)
    groups.other_bounds.copy_(groups.maxima - temperature * (least + gap).log())
    _parts_torch(x, scores, holder, temperature, groups)
    if groups.sums is None or groups.holder_logits is None or groups.holder_scores is None:
        return
    groups.holder_scores.copy_(scores)
    groups.holder_logits.copy_(held)
    difference = torch.where(x == groups.maxima[:, :, None], 0.0, x - groups.maxima[:, :, None])
    scaled = difference / temperature.clamp(min=LEAST_TEMPERATURE)[:, :, None]
    groups.sums.copy_(scaled.exp().sum(dim=2))


def _parts_torch(
    x: torch.Tensor, scores: torch.Tensor, holder: torch.Tensor, temperature: torch.Tensor, groups: Groups
) -> None:
    """x: logits by groups, float32 [n, groups, GROUP]; scores, holder: of their holders; temperature [n, 1]."""
    is_noisy = temperature > 0
    scores = torch.where(is_noisy, scores, groups.maxima)
    first = (x == groups.maxima[:, :, None]).to(torch.uint8).argmax(dim=2)
    ids = torch.arange(x.shape[1], device=x.device) * GROUP + torch.where(is_noisy, holder, first)
    bounds = torch.where(is_noisy, groups.other_bounds, -torch.inf)

    def by_part(values: torch.Tensor, padding: float = -torch.inf) -> torch.Tensor:
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % PART), value=padding)
        return padded.reshape(len(values), -1, PART)

    scores = by_part(scores)
    best = scores.amax(dim=2)
    is_best = (scores == best[:, :, None]) & (scores > -torch.inf)
    best_ids = torch.where(is_best, by_part(ids, 0), 2**31 - 1).amin(dim=2)
    groups.parts[:, 0], groups.parts[:, 1] = by_part(groups.maxima).amax(dim=2), best
    groups.parts.view(torch.int32)[:, 2] = best_ids.to(torch.int32)
    groups.parts[:, 3] = by_part(bounds).amax(dim=2)


def scores_torch(logits: torch.Tensor, rows: SamplingRows, purpose: int) -> torch.Tensor:
    """Score of every id of logits [n, vocab_size], float32; noise is drawn for the rows alone that need it on a CPU."""
    scores, vocab_size = logits.float(), logits.shape[1]
    temperature, seed = rows.temperature[rows.slots], rows.seed[rows.slots]
    position = rows.sampled_positions()
    if scores.is_cuda:  # asking would wait for the device
        return scores + temperature[:, None] * gumbel_torch(seed, position, purpose, vocab_size)
    noisy = temperature > 0
    noise = gumbel_torch(seed[noisy], position[noisy], purpose, vocab_size)
    # Not in place: float32 logits are the caller's own memory here.
    return scores.index_put((noisy,), scores[noisy] + temperature[noisy, None] * noise)


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
def load_groups(source, chosen, start, count, TILE: tl.constexpr) -> Any:
    """The chosen groups from `start` on, int32 [TILE], and their logits, float32 [TILE, GROUP], -inf after the last.

    source: pointer to a row's logits, number of the row, size of the vocabulary, and the kernel's overlay.
    """
    base, row, vocab_size, overlay = source
    place = start + tl.arange(0, TILE)
    groups = tl.load(chosen + place, mask=place < count, other=0)
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = (place < count)[:, None] & (ids < vocab_size)
    x = tl.load(base + ids, mask=inside, other=-float("inf")).to(tl.float32)
    return groups, tl.where(inside, overlaid(x, ids, None, row, vocab_size, overlay), -float("inf"))


@triton.jit
def larger(a, b) -> Any:
    """Maximum that is NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _first_of_largest(source, groups, maxima) -> Any:
    """The lowest id of those with the largest logit of some groups."""
    base, row, vocab_size, overlay = source
    top = tl.max(maxima, axis=0)
    group = tl.min(tl.where(maxima == top, groups, _NO_ID), axis=0)
    ids = group * _GROUP + tl.arange(0, _GROUP)
    x = tl.load(base + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    x = overlaid(x, ids, None, row, vocab_size, overlay)
    return tl.min(tl.where((x == top) & (x > -float("inf")), ids, _NO_ID), axis=0)


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
    other_bounds,
    parts,
    holder_scores,
    holder_logits,
    sums,
    num_groups,
    num_parts,
    overlay,
    purpose: tl.constexpr,
    FILTERS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """GROUPS groups of one row."""
    if PDL:
        gdc_launch_dependents()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = part * GROUPS
    groups = first + tl.arange(0, GROUPS)
    base, at, is_group = logits + row * logits_stride, row * num_groups + groups, groups < num_groups
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(base + ids, mask=ids < vocab_size, other=-float("inf"))
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + tl.load(logits_indices + row)) + 1
    temperature = tl.load(temperatures + slot * parameter_stride)
    seed = tl.load(seeds + slot * seed_stride)
    held, logit = tl.full((GROUPS,), _NO_ID, tl.int32), tl.full((GROUPS,), -float("inf"), tl.float32)
    log_least, noise = tl.zeros((GROUPS,), tl.float32), tl.zeros((GROUPS,), tl.float32)
    if temperature > 0:
        # While the logits are on their way.
        pairs = first // 2 + tl.arange(0, GROUPS // 2)
        least, gap, holder = pair_noise(seed, position, pairs, purpose, GROUPS // 2)
        held = groups * _GROUP + holder
        logit = tl.load(base + held, mask=held < vocab_size, other=-float("inf")).to(tl.float32)
        logit = overlaid(logit, held, None, row, vocab_size, overlay)
        log_least = tl.log(least)
        noise = -temperature * tl.log(least + gap)
    x = overlaid(x.to(tl.float32), ids, groups, row, vocab_size, overlay)
    most = tl.reduce(x, 1, larger)
    tl.store(maxima + at, most, mask=is_group)
    if FILTERS:
        top_k = tl.load(top_ks + slot * parameter_stride)
        top_p = tl.load(top_ps + slot * parameter_stride)
        if is_top_p_alone(temperature, top_k, top_p, vocab_size):
            weight = weights(x, most[:, None], log2_scale(temperature))
            tl.store(sums + at, tl.sum(weight, axis=1), mask=is_group)
    # Read back, each by one thread: several hold a group's maximum, and all would draw its noise.
    tl.debug_barrier()
    peak = tl.load(maxima + at, mask=is_group, other=-float("inf"))
    # What scores an id may round its sum otherwise.
    room = tl.where(peak > -float("inf"), (tl.abs(peak) + tl.abs(noise)) * _ROOM, 0.0)
    bound = tl.where(temperature > 0, peak + noise + room, peak)
    score = logit - temperature * log_least
    tl.store(other_bounds + at, bound, mask=is_group)
    if FILTERS:
        tl.store(holder_scores + at, score, mask=is_group)
        tl.store(holder_logits + at, logit, mask=is_group)

    best = tl.max(score, axis=0)
    best_id = tl.min(tl.where((score == best) & (score > -float("inf")), held, _NO_ID), axis=0)
    top = tl.max(tl.where(is_group, bound, -float("inf")), axis=0)
    if temperature <= 0:
        best_id, best = _first_of_largest((base, row, vocab_size, overlay), groups, peak), top
    parts += row * _PART_VALUES * num_parts + part
    tl.store(parts, tl.reduce(peak, 0, larger))
    tl.store(parts + num_parts, best)
    tl.store(parts + 2 * num_parts, best_id.to(tl.float32, bitcast=True))
    tl.store(parts + 3 * num_parts, tl.where(temperature > 0, top, -float("inf")))


def group_maxima_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    overlay: Overlay | None = None,
) -> None:
    """One program for every `PART` groups of every row."""
    stride = rows.temperature.stride(0)
    assert stride == rows.top_k.stride(0) == rows.top_p.stride(0)
    shape = PLAIN if overlay is None and groups.sums is None else WITH_MORE
    launch = programmatic_launch(logits)
    launch.pop("launch_pdl", None)  # nothing to run ahead of
    _group_maxima_kernel[(groups.parts.shape[2], logits.shape[0])](
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
        groups.parts.shape[2],
        kernel_argument(overlay),
        purpose=purpose,
        FILTERS=groups.sums is not None,
        GROUPS=PART,
        num_warps=shape.num_warps * logits.element_size() // 2,
        maxnreg=shape.max_registers,
        **launch,
    )


def group_maxima(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    overlay: Overlay | None = None,
) -> None:
    """Fill `groups` for every row of logits; see the module's formula and shapes."""
    run = group_maxima_triton if use_triton(logits) else group_maxima_torch
    run(logits, vocab_size, rows, purpose, groups, overlay)
