"""Copy rows of a pool onto other rows of it: pool[target_rows[b]] = pool[source_rows[b]] where target_rows[b] > 0.

pool [num_pool_rows, ...], contiguous; source_rows and target_rows int32 [num_rows]. Targets differ from one another
and from every source.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 4096


def copy_rows_torch(pool: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor) -> None:
    """The formula above; row 0 is copied onto itself where there is no target."""
    pool[target_rows] = pool[torch.where(target_rows > 0, source_rows, 0)]


@triton.jit
def _copy_rows_kernel(pool, source_rows, target_rows, row_size, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0)
    target = tl.load(target_rows + row).to(tl.int64)
    if target > 0:
        source = tl.load(source_rows + row).to(tl.int64)
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < row_size
        value = tl.load(pool + source * row_size + offsets, mask=inside)
        tl.store(pool + target * row_size + offsets, value, mask=inside)


def copy_rows_triton(pool: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor) -> None:
    """Launch one program for each piece of each row."""
    row_size = pool[0].numel()
    grid = (len(target_rows), triton.cdiv(row_size, _BLOCK))
    _copy_rows_kernel[grid](pool, source_rows, target_rows, row_size, BLOCK=_BLOCK)


def copy_rows(pool: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor) -> None:
    """Copy in place."""
    op = copy_rows_triton if use_triton(pool) else copy_rows_torch
    op(pool, source_rows, target_rows)
