"""Apply host-side differences to a persistent tensor.

For every run i and j < cu_lengths[i + 1] - cu_lengths[i]:

    target[rows[i], starts[i] + j] = values[cu_lengths[i] + j]

target [num_rows, num_cols] contiguous; rows, starts int32 [num_runs]; cu_lengths int32 [num_runs + 1];
values [cu_lengths[-1]] in target's dtype. Runs do not overlap: order between programs is undefined.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


def staged_write_torch(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_lengths: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """The formula above, one indexed store."""
    num_values = values.numel()
    lengths = cu_lengths[1:] - cu_lengths[:-1]
    run = torch.repeat_interleave(lengths, output_size=num_values)
    within_run = torch.arange(num_values, device=values.device) - cu_lengths[run]
    target[rows[run], starts[run] + within_run] = values


@triton.jit
def _staged_write_kernel(
    target,
    rows,
    starts,
    cu_lengths,
    values,
    row_stride,
    BLOCK: tl.constexpr,
) -> None:
    run = tl.program_id(0)
    first = tl.load(cu_lengths + run)
    length = tl.load(cu_lengths + run + 1) - first
    # A table of slots x max_model_len may hold more than 2**31 entries.
    row = tl.load(rows + run).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    value = tl.load(values + first + offsets, mask=inside)
    tl.store(target + row * row_stride + tl.load(starts + run) + offsets, value, mask=inside)


def staged_write_triton(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_lengths: torch.Tensor,
    values: torch.Tensor,
    max_length: int,
) -> None:
    """Launch one program for every run and every `_BLOCK` values of the longest run, `max_length`."""
    grid = (rows.numel(), triton.cdiv(max_length, _BLOCK))
    _staged_write_kernel[grid](target, rows, starts, cu_lengths, values, target.stride(0), BLOCK=_BLOCK)


def staged_write(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_lengths: torch.Tensor,
    values: torch.Tensor,
    max_length: int,
) -> None:
    """Write every run; `max_length` is at least the longest run's length."""
    if use_triton(target):
        staged_write_triton(target, rows, starts, cu_lengths, values, max_length)
    else:
        staged_write_torch(target, rows, starts, cu_lengths, values)
