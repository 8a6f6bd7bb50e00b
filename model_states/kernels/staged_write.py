"""Apply host-side differences to a persistent tensor.

For every run i and j < cu_lengths[i + 1] - cu_lengths[i]:

    target[rows[i], starts[i] + j] = values[cu_lengths[i] + j]

runs int32 [3 num_runs + 1] holds rows [num_runs], starts [num_runs] and cu_lengths [num_runs + 1] one after
another; values [cu_lengths[-1]] in target's dtype; target [num_rows, num_cols], contiguous. No two runs touch
the same place: the order between programs is undefined.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


def staged_write_torch(target: torch.Tensor, runs: torch.Tensor, values: torch.Tensor) -> None:
    """The formula above, as one indexed store."""
    num_runs, num_values = runs.numel() // 3, values.numel()
    rows, starts, cu_lengths = torch.split(runs, [num_runs, num_runs, num_runs + 1])
    run = torch.repeat_interleave(cu_lengths[1:] - cu_lengths[:-1], output_size=num_values)
    within_run = torch.arange(num_values, device=values.device) - cu_lengths[run]
    target[rows[run], starts[run] + within_run] = values


@triton.jit(do_not_specialize=["num_runs"])
def _staged_write_kernel(target, row_stride, runs, num_runs, values, BLOCK: tl.constexpr) -> None:
    run = tl.program_id(0)
    # A table of slots x max_model_len may hold more than 2**31 entries.
    row = tl.load(runs + run).to(tl.int64)
    start = tl.load(runs + num_runs + run)
    cu_lengths = runs + 2 * num_runs
    first = tl.load(cu_lengths + run)
    length = tl.load(cu_lengths + run + 1) - first
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    value = tl.load(values + first + offsets, mask=inside)
    tl.store(target + row * row_stride + start + offsets, value, mask=inside)


def staged_write_triton(
    target: torch.Tensor, runs: torch.Tensor, values: torch.Tensor, max_length: int
) -> None:
    """Launch one program for every run and every `_BLOCK` values of the longest run, `max_length`."""
    num_runs = runs.numel() // 3
    grid = (num_runs, triton.cdiv(max_length, _BLOCK))
    _staged_write_kernel[grid](target, target.stride(0), runs, num_runs, values, BLOCK=_BLOCK)


def staged_write(target: torch.Tensor, runs: torch.Tensor, values: torch.Tensor, max_length: int) -> None:
    """Write every run; `max_length` is at least the longest run's length."""
    if use_triton(target):
        staged_write_triton(target, runs, values, max_length)
    else:
        staged_write_torch(target, runs, values)
