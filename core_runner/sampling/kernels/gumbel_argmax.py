"""Greedy and Gumbel-max sampling: the best id of every row of logits.

    score[row, id] = logit[row, id] + temperature[row] * gumbel(seed[row], position[row], id, purpose)
    token_ids[row] = lowest id of those with the largest score, among ids with logit >= threshold[row]

The argmax of `logit / T + gumbel` is that of `logit + T * gumbel`; the second never divides, so nothing
overflows however small T is, and T = 0 is greedy by the same formula. `failed[row]` is set, and
token_ids[row] is 0, where the logits hold a NaN or no id is left (all -inf).

Exact noise has two logarithms, and for every id they would take several times as long as reading the logits. So a
first pass reads the logits and bounds the scores of each block of ids from above, with the same random words:

    gumbel <= -log(v) <= log(2) * (32 - l),    l = straight lines between the powers of two, below log2(word)

and a second pass computes scores in the blocks alone whose bound reaches the best score: nearly always one block of
a row. A block whose logits are too far below the row's for any noise to make up for it draws none.

logits [n, >= vocab_size] (float32, bfloat16 or float16; rows may be strided), thresholds float32 [n] or None,
token_ids int64 [n], failed bool [n], bounds: scratch, float32 [n, num_blocks(vocab_size)].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.noise import gumbel_from_bits, gumbel_torch, noise_bits
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

# More than the noise of one id can be above that of another: from -2.82 to 22.88.
_SPREAD = tl.constexpr(25.8)
# log(2) * 2^-23, and log(2) * (127 + 32): what makes -log(v) of the bits of a float32. Some room for rounding.
_SLOPE, _OFFSET, _ROOM = tl.constexpr(8.262958294867817e-08), tl.constexpr(110.2114), tl.constexpr(5e-7)


class Launch(NamedTuple):
    """How the first pass is cut. A program bounds `span` blocks of `block` ids, one after another."""

    block: int = 1024
    span: int = 8
    num_warps: int = 1
    skip: bool = True  # look at a block's logits before its noise


LAUNCH = Launch()


def num_blocks(vocab_size: int, launch: Launch = LAUNCH) -> int:
    """Columns of `bounds`."""
    return -(-vocab_size // launch.block)


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
def _larger(a, b) -> Any:
    """Maximum that is NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _maximum(x) -> Any:
    """Largest of a matrix, NaN if it holds one."""
    return tl.reduce(tl.reduce(x, 1, _larger), 0, _larger)


@triton.jit
def _places(BLOCK: tl.constexpr) -> Any:
    """Places of a block, int32 [BLOCK / 4, 4]: the four of a row share one draw of noise."""
    return 4 * tl.arange(0, BLOCK // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def _load_block(
    logits, vocab_size, block, threshold, HAS_THRESHOLD: tl.constexpr, BLOCK: tl.constexpr
) -> Any:
    """Logits of one block, float32 [BLOCK / 4, 4], in which a NaN stays and what the threshold drops is -inf."""
    at, start = _places(BLOCK), block * BLOCK
    x = tl.load(logits + start + at, mask=at < vocab_size - start, other=-float("inf")).to(tl.float32)
    return tl.where(x < threshold, -float("inf"), x) if HAS_THRESHOLD else x


@triton.jit
def _bound_kernel(
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
    bounds,
    bounds_stride,
    purpose: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """An upper bound of the scores in each of SPAN blocks of one row; NaN for a block that holds one."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * temperature_stride)
    seed = tl.load(seeds + slot * seed_stride)
    position = tl.load(positions + tl.load(logits_indices + row)) + 1
    threshold = tl.load(thresholds + row) if HAS_THRESHOLD else 0.0
    logits += row * logits_stride

    slope = temperature * _SLOPE
    first = tl.program_id(1) * SPAN
    largest = tl.full((), -float("inf"), tl.float32)
    for block in range(first, tl.minimum(first + SPAN, tl.cdiv(vocab_size, BLOCK))):
        x = _load_block(logits, vocab_size, block, threshold, HAS_THRESHOLD, BLOCK)
        bound = largest
        is_far = False
        if SKIP:
            bound = _maximum(x)
            # False for NaN. A tie goes to the other logit, whose id is lower.
            is_far = bound + temperature * _SPREAD < largest
            largest = tl.maximum(largest, bound)
        if temperature > 0:
            if is_far:
                bound = tl.full((), -float("inf"), tl.float32)
            else:
                bits = noise_bits(seed, position, block * (BLOCK // 4), purpose, BLOCK // 4)
                # The bits of a float32 as an integer grow as its logarithm does, in straight lines.
                lines = bits.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
                bound = _maximum(x - slope * lines) + temperature * _OFFSET
                bound = tl.where(bound > -float("inf"), bound + tl.abs(bound) * _ROOM, bound)
        elif not SKIP:
            bound = _maximum(x)
        tl.store(bounds + row * bounds_stride + block, bound)


@triton.jit
def _choose_kernel(
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
    bounds,
    bounds_stride,
    num_blocks,
    token_ids,
    failed,
    purpose: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Scores of the blocks that may hold the best one of a row, by falling bound, until no other block can."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * temperature_stride)
    seed = tl.load(seeds + slot * seed_stride)
    position = tl.load(positions + tl.load(logits_indices + row)) + 1
    threshold = tl.load(thresholds + row) if HAS_THRESHOLD else 0.0
    logits += row * logits_stride

    at = tl.arange(0, BLOCKS)
    bound = tl.load(bounds + row * bounds_stride + at, mask=at < num_blocks, other=-float("inf"))
    has_nan = tl.max((bound != bound).to(tl.int32), axis=0) > 0
    bound = tl.where(has_nan, -float("inf"), bound)
    best, best_id = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int32)
    top, block = tl.max(bound, axis=0, return_indices=True, return_indices_tie_break_left=True)
    while (top > best) | ((top == best) & (block * BLOCK < best_id)):
        x = _load_block(logits, vocab_size, block, threshold, HAS_THRESHOLD, BLOCK)
        if temperature > 0:
            bits = noise_bits(seed, position, block * (BLOCK // 4), purpose, BLOCK // 4)
            x += temperature * gumbel_from_bits(bits)
        # Not by the index of a reduction over x flattened: Triton 3.6 then numbers x as its threads hold it.
        score = _maximum(x)
        token_id = block * BLOCK + tl.min(tl.min(tl.where(x == score, _places(BLOCK), BLOCK), axis=1), axis=0)
        wins = (score > best) | ((score == best) & (token_id < best_id))
        best, best_id = tl.where(wins, score, best), tl.where(wins, token_id, best_id)
        bound = tl.where(at == block, -float("inf"), bound)
        top, block = tl.max(bound, axis=0, return_indices=True, return_indices_tie_break_left=True)
    fail = best == -float("inf")
    tl.store(token_ids + row, best_id.to(tl.int64))
    tl.store(failed + row, fail)


def gumbel_argmax_triton(
    logits: torch.Tensor,
    vocab_size: int,
    rows: SamplingRows,
    purpose: int,
    thresholds: torch.Tensor | None,
    token_ids: torch.Tensor,
    failed: torch.Tensor,
    bounds: torch.Tensor,
    launch: Launch = LAUNCH,
) -> None:
    """Two launches: a bound for every block of every row, then the best id of every row."""
    num_rows, blocks = logits.shape[0], num_blocks(vocab_size, launch)
    arguments = (
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
        bounds,
        bounds.stride(0),
    )
    options = {"purpose": purpose, "HAS_THRESHOLD": thresholds is not None, "BLOCK": launch.block}
    _bound_kernel[(num_rows, -(-blocks // launch.span))](
        *arguments, **options, SKIP=launch.skip, SPAN=launch.span, num_warps=launch.num_warps
    )
    padded = triton.next_power_of_2(blocks)
    _choose_kernel[(num_rows,)](*arguments, blocks, token_ids, failed, **options, BLOCKS=padded)


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
    bounds = logits.new_empty((logits.shape[0], num_blocks(vocab_size)), dtype=torch.float32)
    gumbel_argmax_triton(logits, vocab_size, rows, purpose, thresholds, token_ids, failed, bounds)
