"""Products of few rows with a weight: bound by reading the weight once.

    linear(x, weight, bias, residual=r, multiplier=s)    s (h . weight^T + bias) + r      with h = x
    norm_linear(x, norm, weight, bias)                   h . weight^T + bias              with h = norm(x)
    gate_up(x, norm, weight, activation)                 act(h . gate^T) * (h . up^T)     with h = norm(x) or x

x [n, k], weight [m, k] (in gate_up [2 m, k]: the rows of gate, then those of up), bias [m], residual [n, m], all of one
dtype; a residual stream may be wider, which is x where it is normed, and residual with what is returned. Returns
[n, m], a new tensor. norm is an `RMSNorm` of k numbers, and activation a key of `ACTIVATIONS`; linear divides x by its
`RowRoot` where it has one. Sums are kept in fp32 and, with all that follows, rounded once. Any n is served: up to
`MAX_ROWS` rows of bf16 or fp16 on a GPU by the kernel (fewer where the weight is wide, as a head's is), some more of
gate_up by `gate_up_product`, all else by torch's product; these two round before the activation.

The kernel gives each program a few rows of weight, and each of its warps a part of their columns. The cut depends on
the shapes alone, so every run gives the same bits, whatever the other rows hold; up to 8 rows products are summed in
one order. A program asks for its first columns before it waits for the kernel before it (see `programmatic_launch`):
what runs just before may not be writing weight, bias or norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from model_states.kernels.act_mul import ACTIVATIONS, act_mul, activated
from model_states.kernels.add_norm import RMSNorm, RowRoot, add_norm, inverse_root, normalised, root_parts
from model_states.kernels.dispatch import use_triton
from model_states.kernels.linear_parts import gate_up_product
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton

__all__ = ["ACTIVATIONS", "MAX_ROWS", "RMSNorm", "gate_up", "linear", "norm_linear"]

MAX_ROWS = 16
_NARROW = 8192  # rows of weight up to which all programs run at once
_MAX_ROWS_OF_WIDE = 8  # where the library's product of more rows is faster


def linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: RMSNorm | None = None,
    activation: str | None = None,
    multiplier: float = 1.0,
    root: RowRoot | None = None,
) -> torch.Tensor:
    """The formulas above, each step with what there is for it; an activation says that weight is gate and up."""
    h = x if root is None else (x.float() * root.inverse()).to(x.dtype)
    if norm is not None:
        h = torch.empty_like(x, dtype=weight.dtype, memory_format=torch.contiguous_format)
        add_norm(x, None, None, norm, 1.0, h)
    if bias is None and (multiplier != 1.0 if residual is None else residual.dtype == weight.dtype):
        added = h.new_empty(()) if residual is None else residual
        return torch.addmm(added, h, weight.T, alpha=multiplier, beta=0 if residual is None else 1)
    out = functional.linear(h, weight, bias)
    if activation is not None:
        both, out = out, out.new_empty(len(out), out.shape[1] // 2)
        act_mul(both, activation, out)
    if residual is None:
        return out if multiplier == 1.0 else out * multiplier
    return torch.add(residual, out, alpha=multiplier)


@dataclass(frozen=True)
class LinearConfig:
    """The cut: rows of weight a program, columns of them a step, and warps that share those.

    staged: the first step's weights wait for x in shared memory, which leaves the registers to the kernel that
    starts meanwhile; else in registers, from where they are multiplied sooner.
    """

    block_m: int
    block_k: int
    num_warps: int
    staged: bool = False


def linear_config(n: int, m: int, k: int) -> LinearConfig:
    """The cut for x [n, k] and weight [m, k], measured on an H200 for k from 1024 to 14336.

    block_k and num_warps, which decide the order of sums, depend on n only where k is between 2048 and 4096.
    """
    width = max(64, triton.next_power_of_2(k))
    staged = n <= 4 and m <= _NARROW
    if width <= 1024:
        return LinearConfig(16, width, 4, staged)
    if width == 2048:
        return LinearConfig(16 if staged else 8, 2048, 8, staged)
    if k < 4096:
        return LinearConfig(8, 4096, 16) if n <= 8 else LinearConfig(8, 2048, 8)
    return LinearConfig(8, 1024, 4)


@triton.jit
def _weight_tile(weight, rows, is_row, cols, K: tl.constexpr, STAGED: tl.constexpr) -> tl.tensor:
    """weight^T at columns cols [SPLIT, PART] of int64 rows [BLOCK_M], as [SPLIT, PART, BLOCK_M].

    The order of the pointers decides whether Triton keeps the tile in shared memory or in registers.
    """
    if STAGED:
        at = weight + rows[None, None, :] * K + cols[:, :, None]
        tile = tl.load(at, mask=is_row[None, None, :] & (cols < K)[:, :, None], other=0.0)
    else:
        at = weight + rows[None, :, None] * K + cols[:, None, :]
        tile = tl.permute(
            tl.load(at, mask=is_row[None, :, None] & (cols < K)[:, None, :], other=0.0), (0, 2, 1)
        )
    return tile


@triton.jit
def _mean_square(x_at, is_token, cols, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """mean(x^2) of each row, [1, rows, 1]."""
    squares = tl.sum(tl.zeros_like(is_token + cols[:, None, :]).to(tl.float32), 2)
    for first in range(0, K, BLOCK_K):
        inside = is_token & (first + cols < K)[:, None, :]
        tile = tl.load(x_at + first, mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(tile * tile, 2)
    return tl.sum(squares, 0)[None, :, None] / K


@triton.jit
def _add_product(
    acc, tile, w, factor, mean_square, eps, HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr
) -> tl.tensor:
    """acc plus the product of x's tile, normed if asked for, and w."""
    if HAS_NORM:
        scale = factor.to(tl.float32)[:, None, :]
        tile = normalised(tile.to(tl.float32), mean_square, scale, eps, ROUNDS_FIRST, w.dtype).to(w.dtype)
    return tl.dot(tile, w, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["n", "m", "eps", "multiplier", "root_size", "root_eps"])
def _linear_kernel(
    out,
    x,
    weight,
    bias,
    residual,
    norm_weight,
    eps,
    multiplier,
    squares,
    root_size,
    root_eps,
    n,
    m,
    x_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    tokens = tl.arange(0, ROWS)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    w_rows = rows
    if ACTIVATION is not None:
        # Rows of gate and up take turns, so that a thread has both halves of what it multiplies.
        w_rows = rows // 2 + rows % 2 * (m // 2)
    # Part s of the columns is warp s's: a product of few rows has nothing else to share out.
    PART: tl.constexpr = BLOCK_K // SPLIT
    cols = tl.arange(0, SPLIT)[:, None] * PART + tl.arange(0, PART)[None, :]
    is_row, is_token = rows < m, (tokens < n)[None, :, None]
    biases = tl.zeros([ROWS, BLOCK_M], tl.float32)
    first_factor = 0.0
    if HAS_NORM:
        first_factor = tl.load(norm_weight + cols, mask=cols < K, other=0.0)
    if HAS_BIAS:
        biases += tl.load(bias + w_rows, mask=rows < m, other=0.0).to(tl.float32)[None, :]
    first_w = _weight_tile(weight, w_rows.to(tl.int64), is_row, cols, K, STAGED)
    if PDL:
        gdc_wait()

    added = 0.0
    if HAS_RESIDUAL:
        beside = residual + tokens[:, None] * m + rows[None, :]
        is_out = (tokens < n)[:, None] & (rows < m)[None, :]
        added = tl.load(beside, mask=is_out, other=0.0).to(tl.float32)
    x_at = x + tokens[None, :, None] * x_stride + cols[:, None, :]
    mean_square = 0.0
    if HAS_NORM:
        mean_square = _mean_square(x_at, is_token, cols, K, BLOCK_K)
    acc = tl.zeros([SPLIT, ROWS, BLOCK_M], tl.float32)
    # What was asked for first is used last, when the others are on their way.
    for first in range(BLOCK_K, K, BLOCK_K):
        is_col = first + cols < K
        tile = tl.load(x_at + first, mask=is_token & is_col[:, None, :], other=0.0)
        w = _weight_tile(weight, w_rows.to(tl.int64), is_row, first + cols, K, STAGED)
        factor = 0.0
        if HAS_NORM:
            factor = tl.load(norm_weight + first + cols, mask=is_col, other=0.0)
        acc = _add_product(acc, tile, w, factor, mean_square, eps, HAS_NORM, ROUNDS_FIRST)
    first_tile = tl.load(x_at, mask=is_token & (cols < K)[:, None, :], other=0.0)
    acc = _add_product(acc, first_tile, first_w, first_factor, mean_square, eps, HAS_NORM, ROUNDS_FIRST)
    total = tl.sum(acc, 0)
    if PARTS > 0:
        row = tokens[:, None]
        total *= inverse_root(squares, row, row < n, root_size, root_eps, PARTS, BLOCK_PARTS)
    total = multiplier * (total + biases) + added

    OUT_M: tl.constexpr = BLOCK_M if ACTIVATION is None else BLOCK_M // 2
    out_m = m if ACTIVATION is None else m // 2
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(total, [ROWS, OUT_M, 2]))
        total = activated(gate, ACTIVATION) * up
    columns = tl.program_id(0) * OUT_M + tl.arange(0, OUT_M)
    out_at = out + tokens[:, None] * out_m + columns[None, :]
    mask = (tokens < n)[:, None] & (columns < out_m)[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: RMSNorm | None = None,
    activation: str | None = None,
    multiplier: float = 1.0,
    root: RowRoot | None = None,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Launch one program for every `block_m` rows of weight."""
    (n, k), m = x.shape, weight.shape[0]
    config = config or linear_config(n, m, k)
    dtype = weight.dtype if residual is None else residual.dtype
    out = x.new_empty(n, m if activation is None else m // 2, dtype=dtype)
    _linear_kernel[(triton.cdiv(m, config.block_m),)](
        out,
        x,
        weight,
        bias,
        None if residual is None else residual.contiguous(),
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        multiplier,
        None if root is None else root.squares,
        1 if root is None else root.size,
        0.0 if root is None else root.eps,
        n,
        m,
        x.stride(0),
        K=k,
        ROWS=triton.next_power_of_2(n),
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        SPLIT=config.num_warps,
        STAGED=config.staged,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None,
        ROUNDS_FIRST=norm is not None and norm.rounds_first,
        ACTIVATION=activation,
        **root_parts(root),
        num_warps=config.num_warps,
        num_stages=1,
        **programmatic_launch(x),
    )
    return out


def _kernel_takes(x: torch.Tensor, weight: torch.Tensor, normed: bool) -> bool:
    """Whether the kernel serves x and weight. What nobody can serve is left to torch, which says why."""
    limit = MAX_ROWS if weight.shape[0] <= _NARROW else _MAX_ROWS_OF_WIDE
    few = 0 < x.shape[0] <= limit and x.stride(1) == 1 and weight.dtype in (torch.bfloat16, torch.float16)
    fits = x.dtype == weight.dtype or (normed and x.dtype == torch.float32)
    return few and fits and x.shape[1] == weight.shape[1] and weight.is_contiguous()


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: RMSNorm | None = None,
    activation: str | None = None,
    multiplier: float = 1.0,
    root: RowRoot | None = None,
) -> torch.Tensor:
    op = linear_triton if use_triton(x) and _kernel_takes(x, weight, norm is not None) else linear_torch
    return op(x, weight, bias, residual, norm, activation, multiplier, root)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    root: RowRoot | None = None,
) -> torch.Tensor:
    """Return `multiplier` times (x . weight^T + bias), plus residual where given; x is divided by its root first."""
    return _product(x, weight, bias, residual, multiplier=multiplier, root=root)


def norm_linear(
    x: torch.Tensor, norm: RMSNorm, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return norm(x) . weight^T, plus bias where given."""
    return _product(x, weight, bias, norm=norm)


def gate_up(
    x: torch.Tensor,
    norm: RMSNorm | None,
    weight: torch.Tensor,
    activation: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return act(gate) * up of x, which is normed first where a norm is given; bias [2 m] is added before."""
    found = gate_up_product(x, weight, activation) if norm is None and bias is None else None
    return _product(x, weight, bias, norm=norm, activation=activation) if found is None else found
