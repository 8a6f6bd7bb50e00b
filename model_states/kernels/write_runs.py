"""Write runs of 4-byte values to wherever they belong: several staged tensors in one launch.

For every run i and j < cu_lengths[i + 1] - cu_lengths[i]:

    *(addresses[i] + 4 j) = values[cu_lengths[i] + j]

packed int32 [3 num_runs + 1 + cu_lengths[-1]] holds addresses (int64) [num_runs], cu_lengths [num_runs + 1] and values
one after another; it begins at a multiple of 8 bytes. The device may write to every address, and no two runs touch the
same place: the order between programs is undefined.
"""

from __future__ import annotations

import torch

from model_states.kernels.triton_import import tl, triton

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_runs"])
def _write_runs_kernel(packed, num_runs, BLOCK: tl.constexpr) -> None:
    run = tl.program_id(0)
    address = tl.load(packed.to(tl.pointer_type(tl.int64)) + run)
    cu_lengths = packed + 2 * num_runs
    first = tl.load(cu_lengths + run)
    length = tl.load(cu_lengths + run + 1) - first
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    value = tl.load(cu_lengths + num_runs + 1 + first + offsets, mask=inside)
    tl.store(address.to(tl.pointer_type(tl.int32)) + offsets, value, mask=inside)


def write_runs(packed: torch.Tensor, num_runs: int, max_length: int) -> None:
    """Launch one program for every run and every `_BLOCK` values of the longest run, `max_length`."""
    grid = (num_runs, triton.cdiv(max_length, _BLOCK))
    _write_runs_kernel[grid](packed, num_runs, BLOCK=_BLOCK)
