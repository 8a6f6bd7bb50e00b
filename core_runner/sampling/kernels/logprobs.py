"""Log-probabilities of chosen ids and the rank of the first of them.

    values[row, j] = logit[row, ids[row, j]] - log(sum over id of exp(logit[row, id]))      in float32
    ranks[row]     = 1 + number of ids with logit > logit[row, ids[row, 0]]

The logits are neither scaled by temperature nor filtered. logits [n, >= vocab_size] (any float type, strided
rows), ids int32 [n, m], values float32 [n, m], ranks int32 [n]. An infinite maximum shares the mass among its
ids, so a row without NaN has no NaN in its values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton


class Launch(NamedTuple):
    """How a row's program runs. block: ids that are looked at together."""

    block: int = 4096
    num_warps: int = 8
    stages: int = 3


LAUNCH = Launch()


def logprobs_torch(
    logits: torch.Tensor, vocab_size: int, ids: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor
) -> None:
    """Plain torch twin."""
    x = logits[:, :vocab_size].float()
    best = x.amax(dim=1, keepdim=True)
    # Not `x - best`: that is NaN where both are infinite.
    shifted = torch.where(x == best, 0.0, x - best)
    log_sum = shifted.exp().sum(dim=1, keepdim=True).log()
    chosen = ids.to(torch.int64)
    values.copy_(shifted.gather(1, chosen) - log_sum)
    ranks.copy_((x > x.gather(1, chosen[:, :1])).sum(dim=1) + 1)


@triton.jit
def _logprobs_kernel(
    logits,
    logits_stride,
    vocab_size,
    ids,
    ids_stride,
    num_ids,
    values,
    values_stride,
    ranks,
    BLOCK: tl.constexpr,
    IDS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One row: running maximum and sum of exp, and the count of larger logits, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * logits_stride
    column = tl.arange(0, IDS)
    wanted = column < num_ids
    # Read before the pass, which then counts the larger logits as it goes.
    chosen = tl.load(base + tl.load(ids + row * ids_stride + column, mask=wanted, other=0)).to(tl.float32)
    first = tl.load(base + tl.load(ids + row * ids_stride)).to(tl.float32)

    # Each lane keeps its own maximum, so that no lane waits for another before the end.
    lane = tl.arange(0, BLOCK)
    lane_best = tl.full((BLOCK,), -float("inf"), tl.float32)
    lane_total = tl.zeros((BLOCK,), tl.float32)
    lane_larger = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        inside = lane < vocab_size - start
        x = tl.load(base + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        # Differences of equal infinities are NaN, hence the tests for equality.
        ratio = tl.exp(tl.where(x == lane_best, 0.0, -tl.abs(x - lane_best)))
        ratio = tl.where(inside, ratio, 0.0)
        lane_total = tl.where(x > lane_best, lane_total * ratio + 1.0, lane_total + ratio)
        lane_larger += (x > first).to(tl.int32)
        lane_best = tl.maximum(lane_best, x)
    best = tl.max(lane_best, axis=0)
    total = tl.sum(lane_total * tl.where(lane_best == best, 1.0, tl.exp(lane_best - best)), axis=0)
    larger = tl.sum(lane_larger, axis=0)

    value = tl.where(chosen == best, 0.0, chosen - best) - tl.log(total)
    tl.store(values + row * values_stride + column, value, mask=wanted)
    tl.store(ranks + row, larger + 1)


def logprobs_triton(
    logits: torch.Tensor,
    vocab_size: int,
    ids: torch.Tensor,
    values: torch.Tensor,
    ranks: torch.Tensor,
    launch: Launch = LAUNCH,
) -> None:
    """One program for every row."""
    _logprobs_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        ids,
        ids.stride(0),
        ids.shape[1],
        values,
        values.stride(0),
        ranks,
        BLOCK=launch.block if vocab_size > launch.block else 1024,
        IDS=triton.next_power_of_2(ids.shape[1]),
        STAGES=launch.stages,
        num_warps=launch.num_warps,
    )


def logprobs(
    logits: torch.Tensor, vocab_size: int, ids: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor
) -> None:
    """Fill `values` and `ranks` for every row of logits; see the module's formula and shapes."""
    run = logprobs_triton if use_triton(logits) else logprobs_torch
    run(logits, vocab_size, ids, values, ranks)
