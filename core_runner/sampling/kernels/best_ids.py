"""The best ids of every row of logits, best first; of equal logits the lowest id comes first.

    ids[row, j] = the id with the j-th largest logit

A group's largest logit is known, so each step reads one group: the one with the largest of what is left.

logits [n, >= vocab_size] (any float type, strided rows), maxima float32 [n, groups] as `group_maxima` leaves them, ids
int32 [n, m], m <= vocab_size, strided rows. In a row with a NaN the ids are any.
"""

from __future__ import annotations

from typing import Any

import torch

from core_runner.sampling.kernels.noise import GROUP
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_GROUP, _NOTHING = tl.constexpr(GROUP), tl.constexpr(-(2**31))


def best_ids_torch(logits: torch.Tensor, vocab_size: int, ids: torch.Tensor) -> None:
    """Plain torch twin."""
    order = logits[:, :vocab_size].float().sort(dim=1, descending=True, stable=True).indices
    ids.copy_(order[:, : ids.shape[1]])


@triton.jit
def _order(x) -> Any:
    """int32 that orders as the logit does, with one zero; never the least int32, which is less than -inf."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best_ids_kernel(
    logits, logits_stride, vocab_size, maxima, num_groups, ids, ids_stride, num_ids, PADDED: tl.constexpr
) -> None:
    """One row. Ids are taken in the order of the result, so what was taken of equal ones is all up to the last id."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * logits_stride
    at, lane = tl.arange(0, PADDED), tl.arange(0, _GROUP)
    left = _order(tl.load(maxima + row * num_groups + at, mask=at < num_groups, other=0.0))
    left = tl.where(at < num_groups, left, _NOTHING)
    last, last_id = tl.full((), 0, tl.int32), tl.full((), -1, tl.int32)
    for j in range(0, num_ids):
        top = tl.max(left, axis=0)
        group = tl.min(tl.where(left == top, at, PADDED), axis=0)
        token = group * _GROUP + lane
        inside = token < vocab_size
        order = _order(tl.load(base + token, mask=inside, other=0.0).to(tl.float32))
        order = tl.where(inside, order, _NOTHING)
        last_id = tl.where(top == last, last_id, -1)
        last = top
        last_id = tl.min(tl.where((order == top) & (token > last_id), token, vocab_size - 1), axis=0)
        tl.store(ids + row * ids_stride + j, last_id)
        is_left = (order < top) | ((order == top) & (token > last_id))
        left = tl.where(at == group, tl.max(tl.where(is_left, order, _NOTHING), axis=0), left)


def best_ids_triton(logits: torch.Tensor, vocab_size: int, maxima: torch.Tensor, ids: torch.Tensor) -> None:
    """One program for every row."""
    num_groups = maxima.shape[1]
    _best_ids_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        vocab_size,
        maxima,
        num_groups,
        ids,
        ids.stride(0),
        ids.shape[1],
        PADDED=triton.next_power_of_2(num_groups),
        num_warps=8,
    )


def best_ids(logits: torch.Tensor, vocab_size: int, maxima: torch.Tensor, ids: torch.Tensor) -> None:
    """Fill `ids` for every row of logits; see the module's formula and shapes."""
    if use_triton(logits):
        best_ids_triton(logits, vocab_size, maxima, ids)
    else:
        best_ids_torch(logits, vocab_size, ids)
