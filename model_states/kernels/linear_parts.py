"""Products of some dozen to some hundred rows with a small weight, which the library leaves most of a GPU idle at.

    product_in_parts(x, weight)[p]     = x[:, P] . weight[:, P]^T, fp32                 P: the p-th part of the columns
    gate_up_product(x, weight, act)    = act(x . gate^T) * (x . up^T)

x [n, k] with rows apart, weight [m, k], in gate_up_product [2 m, k]: the rows of gate, then those of up; all bf16 or
fp16. The parts, [parts, n, m], add up to the product, which what comes next does in passing (`add_norm`): as many as
an H200 runs programs of at once. Gate and up are rounded, as is act, before they are multiplied. Both are `None` for a
product that the library does as well. Sums are fp32.
"""

from __future__ import annotations

from functools import cache

import torch

from model_states.kernels.act_mul import act_mul_torch, activated
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.sizes import cdiv
from model_states.kernels.triton_import import tl, triton

_BLOCK = 64  # rows of x and of weight that a program takes
_BLOCK_K, _STAGES = 128, 4  # columns at a time, and how many times are on their way
_GATED_BLOCK_K, _GATED_STAGES = 64, 5
_PROGRAMS = 132  # that an H200 runs at once, with so much on its way
# Below, `linear` has a kernel that reads weights once. _MAX_ROWS = 0 leaves all products to the library.
_MIN_ROWS, _MAX_ROWS = 17, 256
# Elements of a weight: larger ones are not measured in whole models.
_MAX_SMALL, _MAX_SMALL_GATED = 3 << 19, 3 << 20


def product_in_parts_torch(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """The formula above."""
    cut = zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1), strict=True)
    return torch.stack([columns @ w.T for columns, w in cut])


def gate_up_product_torch(x: torch.Tensor, weight: torch.Tensor, act: str) -> torch.Tensor:
    """The formula above."""
    both = x @ weight.T
    out = both.new_empty(len(both), both.shape[1] // 2)
    act_mul_torch(both, act, out)
    return out


@triton.jit
def _product_in_parts_kernel(
    x,
    weight,
    out,
    n,
    m,
    k_size,
    part_size,
    x_stride,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(2)
    ks = part * part_size + tl.arange(0, BLOCK_K)
    is_row = (rows < n)[:, None]
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, part_size, BLOCK_K):
        xs = tl.load(x + rows[:, None] * x_stride + (k + ks)[None, :], mask=is_row, other=0.0)
        ws = tl.load(weight + columns[None, :] * k_size + (k + ks)[:, None])
        acc = tl.dot(xs, ws, acc)
    tl.store(out + (part * n + rows[:, None]) * m + columns[None, :], acc, mask=is_row)


def product_in_parts_triton(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Launch one program for every tile of the product and part of the columns."""
    (n, k), m = x.shape, len(weight)
    out = x.new_empty(parts, n, m, dtype=torch.float32)
    _product_in_parts_kernel[(m // _BLOCK, cdiv(n, _BLOCK), parts)](
        x,
        weight,
        out,
        n,
        m,
        k,
        k // parts,
        x.stride(0),
        BLOCK=_BLOCK,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
        num_stages=_STAGES,
        **programmatic_launch(x),
    )
    return out


@triton.jit
def _gate_up_product_kernel(
    x,
    weight,
    out,
    n,
    x_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = out.dtype.element_ty
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)
    is_row = (rows < n)[:, None]
    if PDL:
        gdc_wait()
    gate = tl.zeros((BLOCK, BLOCK), tl.float32)
    up = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        xs = tl.load(x + rows[:, None] * x_stride + (k + ks)[None, :], mask=is_row, other=0.0)
        at = weight + columns[None, :] * K + (k + ks)[:, None]
        gate = tl.dot(xs, tl.load(at), gate)
        up = tl.dot(xs, tl.load(at + M * K), up)
    act = activated(gate.to(dtype).to(tl.float32), ACT).to(dtype).to(tl.float32)
    both = act * up.to(dtype).to(tl.float32)
    tl.store(out + rows[:, None] * M + columns[None, :], both.to(dtype), mask=is_row)


def gate_up_product_triton(x: torch.Tensor, weight: torch.Tensor, act: str) -> torch.Tensor:
    """Launch one program for every tile of the result."""
    (n, k), m = x.shape, len(weight) // 2
    out = x.new_empty(n, m)
    _gate_up_product_kernel[(m // _BLOCK, cdiv(n, _BLOCK))](
        x,
        weight,
        out,
        n,
        x.stride(0),
        K=k,
        M=m,
        ACT=act,
        BLOCK=_BLOCK,
        BLOCK_K=_GATED_BLOCK_K,
        num_warps=4,
        num_stages=_GATED_STAGES,
        **programmatic_launch(x),
    )
    return out


def _tiles(n: int, m: int) -> int:
    """Programs of a product [n, m] that is not cut over columns; 0 where n is not of the rows that are served."""
    return m // _BLOCK * cdiv(n, _BLOCK) if _MIN_ROWS <= n <= _MAX_ROWS and not m % _BLOCK else 0


@cache
def num_parts(n: int, m: int, k: int) -> int:
    """Parts of the product of x [n, k] with a weight [m, k], a power of two; 0 for one that the library does."""
    tiles, parts = _tiles(n, m), 1
    if not 0 < tiles <= _PROGRAMS or m * k > _MAX_SMALL or k % _BLOCK_K:
        return 0
    while 2 * parts * tiles <= _PROGRAMS and not k % (2 * parts * _BLOCK_K):
        parts *= 2
    return parts if parts > 1 else 0  # whole, the library's is faster


@cache
def takes_gate_up(n: int, m: int, k: int) -> bool:
    """Whether gate and up of x [n, k] with a weight [m, k] are done here: for as many programs as run at once."""
    tiles = 0 if m % 2 else _tiles(n, m // 2)
    return _PROGRAMS // 2 <= tiles <= _PROGRAMS and m * k <= _MAX_SMALL_GATED and not k % _GATED_BLOCK_K


def _plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    fits = x.dtype == weight.dtype and weight.dtype in (torch.bfloat16, torch.float16)
    return use_triton(x) and fits and x.stride(1) == 1 and weight.is_contiguous()


def product_in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """The parts, or None."""
    parts = num_parts(len(x), *weight.shape) if _plain(x, weight) else 0
    return product_in_parts_triton(x, weight, parts) if parts else None


def gate_up_product(x: torch.Tensor, weight: torch.Tensor, act: str) -> torch.Tensor | None:
    """The result, or None."""
    takes = takes_gate_up(len(x), *weight.shape) and _plain(x, weight)
    return gate_up_product_triton(x, weight, act) if takes else None
