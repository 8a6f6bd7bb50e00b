"""What one pass over the logits leaves of every group of 64 ids and of every part of 64 groups: what decides after it.

    maxima[row, g]         = max over the ids of group g of logit[row, id]            NaN if one of them is
    parts[row, :, p]       = largest of the maxima of part p, NaN if one is; of its holder_scores; the lowest id with
                             that score, in the same bits; largest of its other_bounds
    holder_scores[row, g]  = logit[row, h] + T * its noise,   h = 64 * g + holder[g]         see `noise`
    other_bounds[row, g]   = maxima[row, g] + T * -log(least[g] + gap[g]), or up to 0.12 * T more
    holder_logits[row, g]  = logit[row, h]
    sums[row, g]           = sum over the group of exp((logit[row, id] - maxima[row, g]) / T)

The holder has the largest noise of its group, and no other id's score is above the group's bound. Greedy rows have no
noise, so what has a holder's or a bound is garbage; but parts have the score of their best id, the lowest of several,
and -inf for the bound. The last three are there if rows filter, `sums` for rows that top-p filters without top-k, and
garbage for others; `maxima` if rows filter, or where they are asked for.

logits [n, >= vocab_size] (any float type, strided rows), and what lies over them; results float32,
[n, num_groups(vocab_size)] by groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.groups import (
    LEAST_TEMPERATURE,
    PART,
    PART_VALUES,
    Groups,
    groups_argument,
    larger,
    log2_scale,
    score_bound,
    weights,
)
from core_runner.sampling.kernels.noise import GROUP, group_noise_torch, gumbel_torch, most_gumbel, pair_noise
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument, overlaid, overlaid_torch
from core_runner.sampling.kernels.row_options import (
    is_top_p_alone,
    load_filters,
    load_noise_key,
    load_temperature,
    rows_argument,
)
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton

_GROUP, _PART_VALUES = tl.constexpr(GROUP), tl.constexpr(PART_VALUES)
_NO_ID = tl.constexpr(2**31 - 1)


class Launch(NamedTuple):
    """How a program runs that reads 16-bit logits; with 32 bits it has twice the warps."""

    num_warps: int
    max_registers: int | None


PLAIN = Launch(1, None)
WITH_MORE = Launch(1, 168)  # filters or an overlay: twelve programs at once on an H200's multiprocessor
WITH_PENALTIES = Launch(1, 200)  # no filters: with 168 some would be kept in memory


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
    count = groups.other_bounds.shape[1]
    x = torch.nn.functional.pad(x, (0, count * GROUP - vocab_size), value=-torch.inf).unflatten(
        1, (-1, GROUP)
    )
    most = x.amax(dim=2)
    temperature = rows.temperature[rows.slots][:, None]
    least, gap, holder = group_noise_torch(rows.seed[rows.slots], rows.sampled_positions(), purpose, count)
    held = x.gather(2, holder[:, :, None])[:, :, 0]
    scores = torch.where(temperature > 0, held - temperature * least.log(), -torch.inf)
    groups.other_bounds.copy_(most - temperature * (least + gap).log())
    _parts_torch(x, most, scores, holder, temperature, groups)
    if groups.maxima is not None:
        groups.maxima.copy_(most)
    if groups.sums is None or groups.holder_logits is None or groups.holder_scores is None:
        return
    groups.holder_scores.copy_(scores)
    groups.holder_logits.copy_(held)
    difference = torch.where(x == most[:, :, None], 0.0, x - most[:, :, None])
    scaled = difference / temperature.clamp(min=LEAST_TEMPERATURE)[:, :, None]
    groups.sums.copy_(scaled.exp().sum(dim=2))


def _parts_torch(
    x: torch.Tensor,
    most: torch.Tensor,
    scores: torch.Tensor,
    holder: torch.Tensor,
    temperature: torch.Tensor,
    groups: Groups,
) -> None:
    """x: logits by groups, float32 [n, groups, GROUP]; most: their maxima; scores, holder: of their holders."""
    is_noisy = temperature > 0
    scores = torch.where(is_noisy, scores, most)
    first = (x == most[:, :, None]).to(torch.uint8).argmax(dim=2)
    ids = torch.arange(x.shape[1], device=x.device) * GROUP + torch.where(is_noisy, holder, first)
    bounds = torch.where(is_noisy, groups.other_bounds, -torch.inf)

    def by_part(values: torch.Tensor, padding: float = -torch.inf) -> torch.Tensor:
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % PART), value=padding)
        return padded.reshape(len(values), -1, PART)

    scores = by_part(scores)
    best = scores.amax(dim=2)
    is_best = (scores == best[:, :, None]) & (scores > -torch.inf)
    best_ids = torch.where(is_best, by_part(ids, 0), 2**31 - 1).amin(dim=2)
    groups.parts[:, 0], groups.parts[:, 1] = by_part(most).amax(dim=2), best
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
    rows,
    groups_of_row,
    overlay,
    purpose: tl.constexpr,
    FILTERS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """GROUPS groups of one row."""
    if PDL:
        gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    maxima, other_bounds, parts, holder_scores, holder_logits, sums, num_groups, num_parts = groups_of_row
    first = part * GROUPS
    groups = first + tl.arange(0, GROUPS)
    base, at, is_group = logits + row * logits_stride, row * num_groups + groups, groups < num_groups
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    if FILTERS:
        x = tl.load(base + ids, mask=ids < vocab_size, other=-float("inf"))
    temperature = load_temperature(rows, row)
    top_k, top_p, _ = load_filters(rows, row)
    seed, position = load_noise_key(rows, row)
    held, logit = tl.full((GROUPS,), _NO_ID, tl.int32), tl.full((GROUPS,), -float("inf"), tl.float32)
    log_least, noise = tl.zeros((GROUPS,), tl.float32), tl.zeros((GROUPS,), tl.float32)
    if temperature > 0:
        pairs = first // 2 + tl.arange(0, GROUPS // 2)
        least, gap, holder = pair_noise(seed, position, pairs, purpose, GROUPS // 2)
        held = groups * _GROUP + holder
        if FILTERS:
            logit = tl.load(base + held, mask=held < vocab_size, other=-float("inf")).to(tl.float32)
            logit = overlaid(logit, held, None, row, vocab_size, overlay)
        log_least = tl.log(least)
        noise = temperature * most_gumbel(least + gap)
    if not FILTERS:
        # All logits, and right then the holders' once more: some twenty programs run at once on a multiprocessor, and
        # their logits would soon push each other out of its cache. With filters there are too few to hide the noise.
        # What has been read leaves the other cache first, rather than logits that have yet to be read.
        x = tl.load(base + ids, mask=ids < vocab_size, other=-float("inf"), eviction_policy="evict_first")
        tl.debug_barrier()  # else the assembler may ask for the holders' first
        logit = tl.load(base + held, mask=held < vocab_size, other=-float("inf")).to(tl.float32)
        if temperature > 0:
            logit = overlaid(logit, held, None, row, vocab_size, overlay)
    x = overlaid(x.to(tl.float32), ids, groups, row, vocab_size, overlay)
    most = tl.reduce(x, 1, larger)
    if PDL:
        # Earlier, the next kernel would gain where it has little to do, and lose where it has much.
        gdc_launch_dependents()
    if maxima is not None:
        tl.store(maxima + at, most, mask=is_group)
    if FILTERS:  # noqa: SIM102 (known when it is compiled, and the other is not)
        if is_top_p_alone(temperature, top_k, top_p, vocab_size):
            weight = weights(x, most[:, None], log2_scale(temperature))
            tl.store(sums + at, tl.sum(weight, axis=1), mask=is_group)
    # Taken apart and joined, each is one thread's: several hold a group's maximum, and all would go on with it.
    even, odd = tl.split(tl.reshape(most, (GROUPS // 2, 2)))
    peak = tl.reshape(tl.join(even, odd), (GROUPS,))
    bound = tl.where(temperature > 0, score_bound(peak, noise), peak)
    score = logit - temperature * log_least
    if temperature > 0:
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
    shape = WITH_MORE
    if groups.sums is None and overlay is None:
        shape = PLAIN
    elif groups.sums is None and overlay is not None and overlay.rows.seen_bits is not None:
        shape = WITH_PENALTIES
    _group_maxima_kernel[(groups.parts.shape[2], logits.shape[0])](
        logits,
        logits.stride(0),
        vocab_size,
        rows_argument(rows),
        groups_argument(groups),
        kernel_argument(overlay),
        purpose=purpose,
        FILTERS=groups.sums is not None,
        GROUPS=PART,
        num_warps=shape.num_warps * logits.element_size() // 2,
        maxnreg=shape.max_registers,
        **programmatic_launch(logits),
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
