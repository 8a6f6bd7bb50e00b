"""Write keys or values of encoder outputs to entries of a pool, where a head's positions lie side by side.

    values[entries[i], h, p] = x[i, p, h]                    for p in [0, lengths[i])

x [n, num_positions, num_heads, head_size], any strides but that of the last axis; entries and lengths int64 [n], no two
entries the same. Positions behind an input's length stay as they are. In 8 bits each channel has a scale of its own,
and what lies behind the length has no part in it:

    scales[e, h, d]    = max_p |x[i, p, h, d]| / 127                  e = entries[i]
    values[e, h, p, d] = round(x[i, p, h, d] / scales[e, h, d])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 32  # positions of a program that copies
_BLOCK_8, _CHANNELS_8, _WARPS_8 = 256, 64, 16  # of one that rounds


@dataclass(frozen=True, slots=True)
class Entries:
    """Keys or values of encoder outputs.

    values [num_entries, num_heads, max_len, head_size], contiguous. scales fp32 [num_entries, num_heads, head_size],
    contiguous, of int8 values, which stand for scales * values; None for values that stand for themselves.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def read(self, entries: torch.Tensor | int) -> torch.Tensor:
        """What the values of `entries`, of one or of several, stand for: fp32 out of 8 bits."""
        values = self.values[entries]
        return values if self.scales is None else values * self.scales[entries].unsqueeze(-2)


def write_entries_torch(pool: Entries, entries: torch.Tensor, lengths: torch.Tensor, x: torch.Tensor) -> None:
    """The formulas above, one input at a time."""
    for entry, length, rows in zip(entries.tolist(), lengths.tolist(), x.transpose(1, 2), strict=True):
        rows = rows[:, :length]
        if pool.scales is not None:
            rows = rows.float()
            most = rows.abs().amax(-2)
            pool.scales[entry] = most / 127.0
            rows = (rows * (127.0 / most.where(most > 0.0, 1.0)).unsqueeze(-2)).round()
        pool.values[entry, :, :length] = rows.to(pool.values.dtype)


@triton.jit
def _write_entries_kernel(
    values,
    entries,
    lengths,
    x,
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
    inside = (p < tl.load(lengths + i))[:, None] & (d < HEAD_SIZE)[None, :]
    source = (
        x + i * input_stride + p.to(tl.int64)[:, None] * position_stride + head * head_stride + d[None, :]
    )
    start = (tl.load(entries + i) * NUM_HEADS + head) * max_len
    target = values + (start + p)[:, None] * HEAD_SIZE + d[None, :]
    tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)


@triton.jit
def _rounded(x, steps) -> tl.tensor:
    """The nearest int8 of x * steps: of the sum with 1.5 * 2**23 the lowest byte, sooner than by a conversion."""
    return (x.to(tl.float32) * steps + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _round_entries_kernel(
    values,
    scales,
    entries,
    lengths,
    x,
    max_len,
    input_stride,
    position_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """What is behind the first block is read twice, the second time out of the L2 cache."""
    head, i = tl.program_id(0), tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    p = tl.arange(0, BLOCK)
    length = tl.load(lengths + i).to(tl.int32)
    rows = x + i * input_stride + head * head_stride + p.to(tl.int64)[:, None] * position_stride + d[None, :]
    is_channel = (d < HEAD_SIZE)[None, :]
    first = tl.load(rows, mask=(p < length)[:, None] & is_channel, other=0.0)
    most = tl.abs(first.to(tl.float32))
    source = rows
    for p0 in range(BLOCK, length, BLOCK):
        source += BLOCK * position_stride
        part = tl.load(source, mask=(p < length - p0)[:, None] & is_channel, other=0.0)
        most = tl.maximum(most, tl.abs(part.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    # A number that is none makes an infinite scale: what is read of the entry is none either.
    largest = tl.max(tl.where(most == most, most, float("inf")), 0)
    row = tl.load(entries + i) * NUM_HEADS + head
    tl.store(scales + row * HEAD_SIZE + d, largest / 127.0, mask=d < HEAD_SIZE)
    steps = (127.0 / tl.where(largest > 0.0, largest, 1.0))[None, :]
    target = values + row * max_len * HEAD_SIZE + p[:, None] * HEAD_SIZE + d[None, :]
    tl.store(target, _rounded(first, steps), mask=(p < length)[:, None] & is_channel)
    source = rows
    for p0 in range(BLOCK, length, BLOCK):
        source += BLOCK * position_stride
        target += BLOCK * HEAD_SIZE
        inside = (p < length - p0)[:, None] & is_channel
        part = tl.load(source, mask=inside, other=0.0)
        tl.store(target, _rounded(part, steps), mask=inside)


def write_entries_triton(
    pool: Entries, entries: torch.Tensor, lengths: torch.Tensor, x: torch.Tensor
) -> None:
    """Launch over heads, blocks of positions or of channels, and inputs."""
    n, num_positions, num_heads, head_size = x.shape
    sizes = {"NUM_HEADS": num_heads, "HEAD_SIZE": head_size}
    strides = (pool.values.shape[2], *x.stride()[:3])
    if pool.scales is None:
        _write_entries_kernel[(num_heads, triton.cdiv(num_positions, _BLOCK), n)](
            *(pool.values, entries, lengths, x, *strides),
            **sizes,
            BLOCK=_BLOCK,
            BLOCK_D=triton.next_power_of_2(head_size),
            num_warps=2,
        )
        return
    _round_entries_kernel[(num_heads, triton.cdiv(head_size, _CHANNELS_8), n)](
        *(pool.values, pool.scales, entries, lengths, x, *strides),
        **sizes,
        BLOCK=_BLOCK_8,
        CHANNELS=_CHANNELS_8,
        num_warps=_WARPS_8,
    )


def write_entries(pool: Entries, entries: torch.Tensor, lengths: torch.Tensor, x: torch.Tensor) -> None:
    """Write to `pool`."""
    op = write_entries_triton if use_triton(pool.values) else write_entries_torch
    op(pool, entries, lengths, x)
