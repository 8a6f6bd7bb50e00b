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
groups as `group_maxima` leaves them, ladder as `gumbel_argmax` does, token_ids int64 [n], masses: scratch, float32
[n, RUNGS, parts], chosen: scratch, int32 like the groups.
"""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.draw import TILE, draw, first_best_torch, mass_above
from core_runner.sampling.kernels.group_maxima import scores_torch, top_p_alone
from core_runner.sampling.kernels.groups import PART, Groups, groups_argument, load_row, log2_scale, weights
from core_runner.sampling.kernels.ladder import RUNGS, Ladder
from core_runner.sampling.kernels.noise import GROUP
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument, overlaid, overlaid_torch
from core_runner.sampling.kernels.row_options import load_noise_key, load_temperature, rows_argument
from core_runner.sampling.kernels.top_k_top_p import top_k_top_p_torch
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_GROUP = tl.constexpr(GROUP)


def nucleus_torch(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    token_ids: torch.Tensor,
    overlay: Overlay | None = None,
) -> None:
    """Plain torch twin, which finds the threshold."""
    logits = overlaid_torch(logits, vocab_size, overlay)
    thresholds = logits.new_empty(logits.shape[0], dtype=torch.float32)
    top_k_top_p_torch(logits, vocab_size, rows, True, thresholds)
    scores = scores_torch(logits, rows, purpose)
    scores = scores.masked_fill(logits < thresholds[:, None], -torch.inf)
    has_id = scores.amax(dim=1) > -torch.inf
    token_ids.copy_(torch.where(has_id & top_p_alone(rows, vocab_size), first_best_torch(scores), token_ids))


@triton.jit
def _masses_kernel(
    logits,
    logits_stride,
    vocab_size,
    rows,
    overlay,
    ladder,
    masses,
    RUNGS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """The mass above each rung of one row, in a part of GROUPS groups."""
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    _, rung_logits, edge, _ = ladder
    rung_logits += row * RUNGS
    lowest = tl.load(rung_logits)
    if lowest == float("inf"):
        return
    groups = part * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=-float("inf"))
    has_more = tl.load(rung_logits + 1) < float("inf")
    temperature = load_temperature(rows, row)
    x = overlaid(x.to(tl.float32), ids, groups, row, vocab_size, overlay)
    weight = weights(x, tl.load(edge + row * 2), log2_scale(temperature))
    masses += row * RUNGS * num_parts + part
    tl.store(masses, tl.sum(tl.where(x > lowest, weight, 0.0)))
    if has_more:
        for rung in tl.static_range(1, RUNGS):
            above = x > tl.load(rung_logits + rung)
            tl.store(masses + rung * num_parts, tl.sum(tl.where(above, weight, 0.0)))


@triton.jit
def _nucleus_kernel(
    logits,
    logits_stride,
    vocab_size,
    rows,
    groups,
    overlay,
    ladder,
    masses,
    chosen,
    token_ids,
    purpose: tl.constexpr,
    RUNGS: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One row: its first rung inside the nucleus, or more rungs."""
    row = tl.program_id(0).to(tl.int64)
    rung_ids, rung_logits, edge, thresholds = ladder
    if tl.load(rung_ids + row * RUNGS) < 0:
        return
    maxima, _, _, _, _, _, num_groups, num_parts = groups
    best, need = tl.load(edge + row * 2), tl.load(edge + row * 2 + 1)
    part = tl.arange(0, PARTS)
    token_id, is_inside = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    above = tl.full((), -float("inf"), tl.float32)
    for rung in tl.static_range(RUNGS):
        at = masses + (row * RUNGS + rung) * num_parts + part
        rung_id = tl.load(rung_ids + row * RUNGS + rung)
        if (is_inside == 0) & (rung_id >= 0):
            mass = tl.sum(tl.load(at, mask=part < num_parts, other=0.0), axis=0)
            token_id, above = rung_id, tl.load(rung_logits + row * RUNGS + rung)
            is_inside = (mass < need).to(tl.int32)
    if is_inside == 0:
        temperature = load_temperature(rows, row)
        seed, position = load_noise_key(rows, row)
        source, key = (logits + row * logits_stride, row, vocab_size, overlay), (temperature, seed, position)
        scale, threshold, chosen = (
            log2_scale(temperature),
            tl.load(thresholds + row),
            chosen + row * num_groups,
        )
        most = load_row(maxima, row, num_groups, PADDED)
        while is_inside == 0:
            _score, token_id, above = draw(
                source, key, groups, most, chosen, above, threshold, purpose, PADDED, TILE
            )
            mass = mass_above(source, most, chosen, above, best, scale, PADDED, TILE)
            is_inside = (mass < need).to(tl.int32)
    tl.store(token_ids + row, token_id.to(tl.int64))


def nucleus_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    ladder: Ladder,
    token_ids: torch.Tensor,
    masses: torch.Tensor,
    chosen: torch.Tensor,
    overlay: Overlay | None = None,
) -> None:
    """Two launches: the mass above every rung, part by part, and the choice. Other rows leave both at once."""
    where, over = (logits, logits.stride(0), vocab_size, rows_argument(rows)), kernel_argument(overlay)
    num_groups, num_parts = groups.other_bounds.shape[1], groups.parts.shape[2]
    _masses_kernel[(num_parts, logits.shape[0])](
        *where,
        over,
        tuple(ladder),
        masses,
        RUNGS=RUNGS,
        GROUPS=PART,
        num_warps=4 * logits.element_size() // 2,
    )
    _nucleus_kernel[(logits.shape[0],)](
        *where,
        groups_argument(groups),
        over,
        tuple(ladder),
        masses,
        chosen,
        token_ids,
        purpose=purpose,
        RUNGS=RUNGS,
        PADDED=triton.next_power_of_2(num_groups),
        PARTS=triton.next_power_of_2(num_parts),
        TILE=TILE,
        num_warps=8,
        maxnreg=128,
    )


def nucleus(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    ladder: Ladder,
    token_ids: torch.Tensor,
    overlay: Overlay | None = None,
) -> None:
    """Change `token_ids` where they fall out of the nucleus; see the module's formula and shapes."""
    if not use_triton(logits):
        nucleus_torch(logits, vocab_size, rows, purpose, token_ids, overlay)
        return
    masses = logits.new_empty((logits.shape[0], RUNGS, groups.parts.shape[2]), dtype=torch.float32)
    chosen = torch.empty_like(groups.other_bounds, dtype=torch.int32)
    nucleus_triton(logits, vocab_size, rows, purpose, groups, ladder, token_ids, masses, chosen, overlay)
