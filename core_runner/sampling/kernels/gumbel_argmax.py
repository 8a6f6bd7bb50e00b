"""Greedy and Gumbel-max sampling: the best id of every row of logits.

    score[row, id] = logit[row, id] + temperature[row] * gumbel(seed[row], position[row], id, purpose)
    token_ids[row] = lowest id of those with the largest score, among ids that the row's filters leave

The argmax of `logit / T + gumbel` is that of `logit + T * gumbel`; the second never divides, so nothing
overflows however small T is, and T = 0 is greedy by the same formula. `failed[row]` is set, and
token_ids[row] is 0, where the logits hold a NaN or no id is left (all -inf).

The holder of each group's largest noise has its score from `group_maxima`, and each part of a row the best of those.
The best of them all is the answer, unless a bound of other ids reaches it; `draw` looks into the groups where one does.

Where rows filter, a `ladder` is given: rows that top-p alone filters may leave the decision to `nucleus` by it.

logits [n, >= vocab_size] (float32, bfloat16 or float16; rows may be strided), what lies over them, groups of them as
`group_maxima` leaves them, token_ids int64 [n], failed bool [n], chosen: scratch, int32 like the groups.
"""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.draw import TILE, first_best_torch, look_into_groups
from core_runner.sampling.kernels.group_maxima import scores_torch
from core_runner.sampling.kernels.groups import Groups, best_holder, groups_argument, load_row
from core_runner.sampling.kernels.ladder import Ladder, Launch, fill_ladder_torch, filtered_argmax_triton
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument, overlaid_torch
from core_runner.sampling.kernels.row_options import load_noise_key, load_temperature, rows_argument
from core_runner.sampling.kernels.top_k_top_p import top_k_top_p_torch
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton

LAUNCH = Launch(num_warps=4, max_registers=None)


def gumbel_argmax_torch(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
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
    if ladder is not None:
        top_k_top_p_torch(logits, vocab_size, rows, False, ladder.thresholds)
        scores = scores.masked_fill(x < ladder.thresholds[:, None], -torch.inf)
        fill_ladder_torch(x, scores, rows, ladder)
    token_ids.copy_(first_best_torch(scores).masked_fill(failed, 0))


@triton.jit
def _plain_kernel(
    logits,
    logits_stride,
    vocab_size,
    rows,
    groups,
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
    temperature = load_temperature(rows, row)
    seed, position = load_noise_key(rows, row)
    if PDL:
        gdc_wait()
    _, other_bounds, _, _, _, _, num_groups, _ = groups
    # Before it is known whether they matter: to ask first would take as long as to read them.
    bounds = load_row(other_bounds, row, num_groups, PADDED)
    tl.debug_barrier()  # else the assembler asks only when they do
    peak, best, token_id, bound = best_holder(groups, row, PARTS)
    if (bound >= best) & (bound > -float("inf")):
        nothing = tl.full((), -float("inf"), tl.float32)
        best, token_id, nothing = look_into_groups(
            (logits + row * logits_stride, row, vocab_size, overlay),
            (temperature, seed, position),
            bounds,
            peak,
            (best, token_id, nothing),
            chosen + row * num_groups,
            nothing,
            nothing,
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
    _plain_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        rows_argument(rows),
        groups_argument(groups),
        kernel_argument(overlay),
        chosen,
        token_ids,
        failed,
        purpose=purpose,
        PADDED=triton.next_power_of_2(groups.other_bounds.shape[1]),
        PARTS=triton.next_power_of_2(groups.parts.shape[2]),
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
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    chosen: torch.Tensor,
    ladder: Ladder | None = None,
    overlay: Overlay | None = None,
) -> None:
    """One program for every row."""
    if ladder is None:
        _plain_triton(logits, vocab_size, rows, purpose, groups, token_ids, failed, chosen, overlay)
    else:
        filtered_argmax_triton(
            logits, vocab_size, rows, purpose, groups, token_ids, failed, chosen, ladder, overlay
        )


def gumbel_argmax(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    groups: Groups,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    ladder: Ladder | None = None,
    overlay: Overlay | None = None,
) -> None:
    """Fill `token_ids`, `failed` and `ladder` for every row of logits; see the module's formula and shapes."""
    if not use_triton(logits):
        gumbel_argmax_torch(logits, vocab_size, rows, purpose, token_ids, failed, ladder, overlay)
        return
    chosen = torch.empty_like(groups.other_bounds, dtype=torch.int32)
    gumbel_argmax_triton(
        logits, vocab_size, rows, purpose, groups, token_ids, failed, chosen, ladder, overlay
    )
