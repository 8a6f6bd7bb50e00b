"""Products of rows with weights that differ from row to row: those of the experts that the rows are sent to.

    out[p] = x[p // repeats] . weight[e]^T + bias[e]    for every pair p = order[i] with ends[e - 1] <= i < ends[e]

order int64 [S] sorts S pairs by their expert e, and ends int32 [E] says where each expert's pairs end (ends[-1] = 0);
`sorted_by` makes both of the experts' numbers. x [S / repeats, k] has its rows apart, weight [E, m, k] has any strides,
bias [E, m] is contiguous; out is new, [S, m] of weight's dtype. Sums are fp32. Nothing waits for the host: how many
rows an expert has is read on the device, and the cut depends on the shapes alone.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton


def sorted_by(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """order and ends of the pairs whose experts are `experts`, int64 [S]."""
    ids, order = experts.sort(stable=True)
    numbers = torch.arange(num_experts, device=experts.device)
    return order, torch.searchsorted(ids, numbers, right=True, out_int32=True)


def grouped_linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    ends: torch.Tensor,
    repeats: int,
) -> torch.Tensor:
    """The formula above, expert by expert; it waits for the device."""
    out = weight.new_empty(len(order), weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        pairs = order[start:end]
        own_bias = None if bias is None else bias[expert]
        out[pairs] = torch.nn.functional.linear(
            x[pairs // repeats].to(weight.dtype), weight[expert], own_bias
        )
        start = end
    return out


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_linear_kernel(
    out,
    x,
    weight,
    bias,
    order,
    ends,
    num_pairs,
    x_stride,
    expert_stride,
    m_stride,
    k_stride,
    REPEATS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Tiles of rows are counted expert by expert; each program finds whose its own is.
    e = tl.arange(0, BLOCK_E)
    stops = tl.load(ends + e, mask=e < NUM_EXPERTS, other=0)
    starts = tl.load(ends + e - 1, mask=(e > 0) & (e < NUM_EXPERTS), other=0)
    tiles = tl.where(e < NUM_EXPERTS, (stops - starts + BLOCK_N - 1) // BLOCK_N, 0)
    tile, tiles_until = tl.program_id(1), tl.cumsum(tiles, 0)
    if tile < tl.sum(tiles, 0):
        expert = tl.sum((tiles_until <= tile).to(tl.int32), 0)
        is_own = e == expert
        start = tl.sum(tl.where(is_own, starts + (tile - tiles_until + tiles) * BLOCK_N, 0), 0)
        stop = tl.sum(tl.where(is_own, stops, 0), 0)
        i = start + tl.arange(0, BLOCK_N)
        is_row = i < stop
        pair = tl.load(order + i, mask=is_row, other=0)
        columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        is_column = columns < M
        row_at = x + (pair // REPEATS) * x_stride
        weight_at = weight + expert.to(tl.int64) * expert_stride + tl.minimum(columns, M - 1) * m_stride
        ks = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(0, K, BLOCK_K):
            inside = first + ks < K
            rows = tl.load(row_at[:, None] + first + ks[None, :], mask=inside[None, :], other=0.0)
            w_at = weight_at[None, :] + (first + ks)[:, None] * k_stride
            w = tl.load(w_at, mask=inside[:, None], other=0.0)
            acc = tl.dot(rows.to(w.dtype), w, acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(bias + expert * M + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        place = pair[:, None] * M + columns[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    ends: torch.Tensor,
    repeats: int,
    shape: tuple[int, int, int, int, int] | None = None,
) -> torch.Tensor:
    """Launch one program for every tile of out that there may be; those beyond what there is end at once.

    shape: rows, columns and sums of a tile, warps, and loads on their way.
    """
    num_pairs, (num_experts, m, k) = len(order), weight.shape
    out = weight.new_empty(num_pairs, m)
    if not num_pairs:
        return out
    block_n, block_m, block_k, num_warps, num_stages = shape or _tile(num_pairs, weight)
    most_tiles = num_pairs // block_n + min(num_pairs, num_experts)
    _grouped_linear_kernel[(triton.cdiv(m, block_m), most_tiles)](
        out,
        x,
        weight,
        bias,
        order,
        ends,
        num_pairs,
        x.stride(0),
        *weight.stride(),
        REPEATS=repeats,
        NUM_EXPERTS=num_experts,
        M=m,
        K=k,
        HAS_BIAS=bias is not None,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_N=block_n,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def _tile(num_pairs: int, weight: torch.Tensor) -> tuple[int, int, int, int, int]:
    """As many rows as an expert has on average, so that few are empty."""
    rows = min(max(triton.next_power_of_2(triton.cdiv(num_pairs, len(weight))), 16), 128)
    if weight.element_size() > 2:
        return rows, 64 if rows <= 64 else 128, 32, 8 if rows == 128 else 4, 2
    if rows <= 32:
        return rows, 128, 128, 4, 4
    return rows, 256, 64, 8, 4


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    ends: torch.Tensor,
    repeats: int = 1,
) -> torch.Tensor:
    """Return every pair's product, [S, m]."""
    op = grouped_linear_triton if use_triton(x) else grouped_linear_torch
    return op(x, weight, bias, order, ends, repeats)
