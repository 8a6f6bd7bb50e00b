"""What one pass over the logits leaves of every group of 64 ids: its largest logit, and its weight.

    maxima[row, g] = max over the ids of group g of logit[row, id]                NaN if one of them is
    sums[row, g]   = sum over them of exp((logit[row, id] - maxima[row, g]) / T)  in rows that top-p alone filters

Everything after that looks into the few groups that can matter: the winner's, those of the best k ids, those that hold
a logit above another. `sums` has garbage in the other rows, for which nobody reads it.

logits [n, >= vocab_size] (any float type, strided rows); maxima and sums float32 [n, num_groups(vocab_size)].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core_runner.sampling.kernels.noise import GROUP
from core_runner.sampling.rows import SamplingRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

SPAN = 16  # groups of a lane, where a program holds the maxima of a row
_GROUP = tl.constexpr(GROUP)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_TEMPERATURE = (
    1e-30  # its inverse is finite; a smaller temperature leaves only the largest logits anyway
)
_LEAST = tl.constexpr(_LEAST_TEMPERATURE)


class Groups(NamedTuple):
    """One pass over a step's logits, by groups of ids."""

    maxima: torch.Tensor
    sums: torch.Tensor | None  # None where no row of the batch filters


class Launch(NamedTuple):
    """How the pass is cut: groups of one program, and its warps."""

    groups: int = 4096 // GROUP
    num_warps: int = 4


LAUNCH = Launch()


def num_groups(vocab_size: int) -> int:
    """Groups of a row."""
    return -(-vocab_size // GROUP)


def num_lanes(num_groups: int) -> int:
    """Lanes that hold as many groups."""
    lanes: int = triton.next_power_of_2(-(-num_groups // SPAN))
    return lanes


def new_groups(logits: torch.Tensor, vocab_size: int, filters: bool) -> Groups:
    """Room for what `group_maxima` writes."""
    shape = (logits.shape[0], num_groups(vocab_size))
    maxima = logits.new_empty(shape, dtype=torch.float32)
    return Groups(maxima, torch.empty_like(maxima) if filters else None)


def top_p_alone(rows: SamplingRows, vocab_size: int) -> torch.Tensor:
    """Rows whose ids are filtered by top-p and not by top-k, bool [n]."""
    top_k, top_p = rows.top_k[rows.slots], rows.top_p[rows.slots]
    return (rows.temperature[rows.slots] > 0) & (top_p < 1) & ((top_k <= 0) | (top_k >= vocab_size))


def group_maxima_torch(logits: torch.Tensor, vocab_size: int, rows: SamplingRows, groups: Groups) -> None:
    """Plain torch twin."""
    x = logits[:, :vocab_size].float()
    padding = groups.maxima.shape[1] * GROUP - vocab_size
    x = torch.nn.functional.pad(x, (0, padding), value=-torch.inf).unflatten(1, (-1, GROUP))
    groups.maxima.copy_(x.amax(dim=2))
    if groups.sums is not None:
        most = groups.maxima[:, :, None]
        temperature = rows.temperature[rows.slots].clamp(min=_LEAST_TEMPERATURE)[:, None, None]
        groups.sums.copy_(torch.where(x == most, 0.0, (x - most) / temperature).exp().sum(dim=2))


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
def load_maxima(maxima, num_groups, LANES: tl.constexpr, SPAN: tl.constexpr) -> Any:
    """The groups of a row, int32 [LANES, SPAN], and their largest logits, float32; -inf for what is no group."""
    groups = tl.arange(0, LANES)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    return groups, tl.load(maxima + groups, mask=groups < num_groups, other=-float("inf"))


@triton.jit
def largest(x) -> Any:
    """Largest of a matrix."""
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def total_mass(sums, groups, maxima, num_groups, best, scale) -> Any:
    """Sum of the weights of all ids of a row, from what `load_maxima` gave."""
    part = tl.load(sums + groups, mask=groups < num_groups, other=0.0)
    return tl.sum(tl.sum(part * weights(maxima, best, scale), axis=1), axis=0)


@triton.jit
def collect(chosen, groups, keep) -> Any:
    """Write the groups that `keep` marks side by side to `chosen`, for all threads to read; returns their count.

    groups, keep: matrices of one shape.
    """
    kept = keep.to(tl.int32)
    in_lane = tl.sum(kept, axis=1)
    count = tl.sum(in_lane, axis=0)
    if count > 0:
        before = tl.cumsum(in_lane, axis=0) - in_lane
        tl.debug_barrier()  # what is there may still be being read
        tl.store(chosen + before[:, None] + tl.cumsum(kept, axis=1) - 1, groups, mask=keep)
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
def _larger(a, b) -> Any:
    """Maximum that is NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _group_maxima_kernel(
    logits,
    logits_stride,
    vocab_size,
    slots,
    temperatures,
    top_ks,
    top_ps,
    parameter_stride,
    maxima,
    sums,
    num_groups,
    HAS_SUMS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """GROUPS groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    ids = (first + tl.arange(0, GROUPS)[:, None]) * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    most = tl.reduce(x, 1, _larger)
    groups = first + tl.arange(0, GROUPS)
    at = row * num_groups + groups
    tl.store(maxima + at, most, mask=groups < num_groups)
    if HAS_SUMS:
        parameters = tl.load(slots + row).to(tl.int64) * parameter_stride
        temperature = tl.load(temperatures + parameters)
        top_k, top_p = tl.load(top_ks + parameters), tl.load(top_ps + parameters)
        if is_top_p_alone(temperature, top_k, top_p, vocab_size):
            weight = weights(x, most[:, None], log2_scale(temperature))
            tl.store(sums + at, tl.sum(weight, axis=1), mask=groups < num_groups)


def group_maxima_triton(
    logits: torch.Tensor, vocab_size: int, rows: SamplingRows, groups: Groups, launch: Launch = LAUNCH
) -> None:
    """One program for every `launch.groups` groups of every row."""
    stride = rows.temperature.stride(0)
    assert stride == rows.top_k.stride(0) == rows.top_p.stride(0)
    _group_maxima_kernel[(logits.shape[0], triton.cdiv(groups.maxima.shape[1], launch.groups))](
        logits,
        logits.stride(0),
        vocab_size,
        rows.slots,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        stride,
        groups.maxima,
        groups.sums,
        groups.maxima.shape[1],
        HAS_SUMS=groups.sums is not None,
        GROUPS=launch.groups,
        num_warps=launch.num_warps,
    )


def group_maxima(logits: torch.Tensor, vocab_size: int, rows: SamplingRows, groups: Groups) -> None:
    """Fill `groups` for every row of logits; see the module's formula and shapes."""
    run = group_maxima_triton if use_triton(logits) else group_maxima_torch
    run(logits, vocab_size, rows, groups)
