"""Write keys or values of encoder outputs to entries of a pool, where a head's positions lie side by side.

    pool[entries[i], h, p] = x[i, p, h]                      for p in [0, num_positions)

x [n, num_positions, num_heads, head_size], any strides but that of the last axis; entries int64 [n], no two the same;
pool [num_entries, num_heads, max_len, head_size], contiguous. Positions behind num_positions stay as they are.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 32  # positions of a program


def write_entries_torch(pool: torch.Tensor, entries: torch.Tensor, x: torch.Tensor) -> None:
    """The formula above."""
    pool[:, :, : x.shape[1]].index_copy_(0, entries, x.transpose(1, 2))


@triton.jit
def _write_entries_kernel(
    pool,
    entries,
    x,
    num_positions,
    max_len,
    input_stride,
    position_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    # Heads change first: what they read lies side by side.
    head, i = tl.program_id(0), tl.program_id(2).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    inside = (p < num_positions)[:, None] & (d < HEAD_SIZE)[None, :]
    source = (
        x + i * input_stride + p.to(tl.int64)[:, None] * position_stride + head * head_stride + d[None, :]
    )
    start = (tl.load(entries + i) * NUM_HEADS + head) * max_len
    target = pool + (start + p)[:, None] * HEAD_SIZE + d[None, :]
    tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)


def write_entries_triton(pool: torch.Tensor, entries: torch.Tensor, x: torch.Tensor) -> None:
    """Launch over (heads, blocks of positions, inputs)."""
    n, num_positions, num_heads, head_size = x.shape
    _write_entries_kernel[(num_heads, triton.cdiv(num_positions, _BLOCK), n)](
        *(pool, entries, x, num_positions, pool.shape[2], *x.stride()[:3]),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK=_BLOCK,
        BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=2,
    )


def write_entries(pool: torch.Tensor, entries: torch.Tensor, x: torch.Tensor) -> None:
    """Write to `pool`."""
    op = write_entries_triton if use_triton(pool) else write_entries_torch
    op(pool, entries, x)
