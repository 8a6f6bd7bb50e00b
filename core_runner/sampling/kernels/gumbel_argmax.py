"""Greedy and Gumbel-max sampling: the best id of every row of logits.

    score[row, id] = logit[row, id] + temperature[row] * gumbel(seed[row], position[row], id, purpose)
    token_ids[row] = lowest id of those with the largest score, among ids with logit >= threshold[row]

The argmax of `logit / T + gumbel` is that of `logit + T * gumbel`; the second never divides, so nothing
overflows however small T is, and T = 0 is greedy by the same formula. `failed[row]` is set, and
token_ids[row] is 0, where the logits hold a NaN or no id is left (all -inf).

logits [n, >= vocab_size] (float32, bfloat16 or float16; rows may be strided), thresholds float32 [n] or None,
token_ids int64 [n], failed bool [n], scratch: float32 and int32 [n, num_blocks(vocab_size)].
"""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.noise import gumbel_from_bits, gumbel_torch, noise_bits
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


def num_blocks(vocab_size: int) -> int:
    """Columns of the scratch tensors."""
    return -(-vocab_size // _BLOCK)


def gumbel_argmax_torch(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    thresholds: torch.Tensor | None,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
) -> None:
    """Plain torch twin; draws noise only for the rows that need it where asking does not wait for a GPU."""
    scores = logits[:, :vocab_size].float()
    failed.copy_(scores.isnan().any(dim=1) | (scores == -torch.inf).all(dim=1))
    if thresholds is not None:
        scores = scores.masked_fill(scores < thresholds[:, None], -torch.inf)
    temperature, seed = rows.temperature[rows.slots], rows.seed[rows.slots]
    position = rows.sampled_positions()
    if scores.is_cuda:
        scores = scores + temperature[:, None] * gumbel_torch(seed, position, purpose, vocab_size)
    elif (temperature > 0).any():
        noisy = temperature > 0
        noise = gumbel_torch(seed[noisy], position[noisy], purpose, vocab_size)
        # Not in place: float32 logits are the caller's own memory here.
        scores = scores.index_put((noisy,), scores[noisy] + temperature[noisy, None] * noise)
    # max() may give any of several equal ids; argmax over "is the maximum" gives the first.
    best = scores.amax(dim=1, keepdim=True)
    ids = (scores == best).to(torch.uint8).argmax(dim=1)
    token_ids.copy_(ids.masked_fill(failed, 0))


@triton.jit
def _partial_kernel(
    logits,
    logits_stride,
    vocab_size,
    slots,
    logits_indices,
    positions,
    temperatures,
    temperature_stride,
    seeds,
    seed_stride,
    thresholds,
    part_scores,
    part_ids,
    part_stride,
    purpose: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Best score and its id in one block of one row; id -1 tells of a NaN."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    score = tl.load(logits + row * logits_stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    has_nan = tl.max((score != score).to(tl.int32), axis=0)
    if HAS_THRESHOLD:
        score = tl.where(score >= tl.load(thresholds + row), score, -float("inf"))

    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * temperature_stride)
    # Noise costs more than all the rest here, and a greedy row has no use for it.
    if temperature > 0:
        seed = tl.load(seeds + slot * seed_stride)
        position = tl.load(positions + tl.load(logits_indices + row)) + 1
        bits = noise_bits(seed, position, block * (BLOCK // 4), purpose, BLOCK // 4)
        score += temperature * gumbel_from_bits(bits)

    # The row fails anyway; a NaN must not decide what the maximum is.
    score = tl.where(score != score, -float("inf"), score)
    best, index = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(part_scores + row * part_stride + block, best)
    tl.store(part_ids + row * part_stride + block, tl.where(has_nan > 0, -1, block * BLOCK + index))


@triton.jit
def _reduce_kernel(
    part_scores, part_ids, part_stride, blocks, token_ids, failed, BLOCKS: tl.constexpr
) -> None:
    """Best of a row's blocks; blocks are in order of id, so the first of equals has the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    scores = tl.load(part_scores + row * part_stride + block, mask=inside, other=-float("inf"))
    ids = tl.load(part_ids + row * part_stride + block, mask=inside, other=0)
    best, index = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    fail = (tl.min(ids, axis=0) < 0) | (best == -float("inf"))
    chosen = tl.sum(tl.where(block == index, ids, 0), axis=0)
    tl.store(token_ids + row, tl.where(fail, 0, chosen).to(tl.int64))
    tl.store(failed + row, fail)


def gumbel_argmax_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    thresholds: torch.Tensor | None,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Two launches: a partial argmax for every (row, block), then one reduction for every row."""
    num_rows, blocks = logits.shape[0], num_blocks(vocab_size)
    part_scores, part_ids = scratch
    _partial_kernel[(num_rows, blocks)](
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
        thresholds,
        part_scores,
        part_ids,
        part_scores.stride(0),
        purpose,
        HAS_THRESHOLD=thresholds is not None,
        BLOCK=_BLOCK,
    )
    padded = triton.next_power_of_2(blocks)
    _reduce_kernel[(num_rows,)](
        part_scores, part_ids, part_scores.stride(0), blocks, token_ids, failed, BLOCKS=padded
    )


def gumbel_argmax(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    thresholds: torch.Tensor | None,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
) -> None:
    """Fill `token_ids` and `failed` for every row of logits; see the module's formula and shapes."""
    if not use_triton(logits):
        gumbel_argmax_torch(logits, vocab_size, rows, purpose, thresholds, token_ids, failed)
        return
    shape = (logits.shape[0], num_blocks(vocab_size))
    scratch = (logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32))
    gumbel_argmax_triton(logits, vocab_size, rows, purpose, thresholds, token_ids, failed, scratch)
