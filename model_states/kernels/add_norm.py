"""What lies between two sublayers of a decoder, in one pass over memory: norm of the output, residual add, next norm.

For every row of x [num_rows, size], in fp32, rounded to x's dtype (that of out, for parts) at each `:=`

    x        := sum of its parts                where x is [parts, num_rows, size], fp32 parts of a product
    x        := x / root                        where x has a root of its own, see `RowRoot`; not rounded
    x        := norm(x; post)                   where there is a post norm
    x        := multiplier * x
    residual := residual + x                    where there is a residual, in place
    out      := norm(residual or x; pre)        where there is a pre norm

    norm(x; weight, eps) = x / sqrt(mean(x^2) + eps) * weight

with the quotient rounded before the weight is applied where the norm `rounds_first`. Rows of x, residual and out may
lie apart; the last axis is contiguous. out may be x. The residual may be of a wider dtype, and is rounded to its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.sizes import cdiv, next_power_of_2
from model_states.kernels.triton_import import tl, triton

MAX_SIZE = 32768  # a program holds a row


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """An RMS norm: weight [size], eps, and whether it rounds before it applies the weight."""

    weight: torch.Tensor
    eps: float
    rounds_first: bool


@dataclass(frozen=True, slots=True)
class RowRoot:
    """A number of each row that it is still to be divided by: root = sqrt(sum(squares) / size + eps).

    squares fp32 [num_rows, parts] are sums over parts of the `size` numbers that a norm is over. A product of the rows
    may come first, since it has the same root.
    """

    squares: torch.Tensor
    size: int
    eps: float

    def inverse(self) -> torch.Tensor:
        """1 / root, fp32 [num_rows, 1]."""
        return torch.rsqrt(self.squares.sum(1, keepdim=True) / self.size + self.eps)


def rms_norm_torch(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """The norm of x [.., size] over its last axis, in x's dtype."""
    wide = x.float()
    quotient = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounds_first:
        quotient = quotient.to(x.dtype).float()
    return (quotient * norm.weight.float()).to(x.dtype)


def add_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post: RMSNorm | None,
    pre: RMSNorm | None,
    multiplier: float,
    out: torch.Tensor | None,
    root: RowRoot | None = None,
) -> None:
    """The formula above, line by line."""
    if x.dim() > 2:
        assert out is not None, "parts do not say what they are rounded to"
        x = x.sum(0).to(out.dtype)
    if root is not None:
        x = (x.float() * root.inverse()).to(x.dtype)
    if post is not None:
        x = rms_norm_torch(x, post)
    if multiplier != 1.0:
        x = x * multiplier
    if residual is not None:
        x = residual.add_(x)
    if pre is not None:
        assert out is not None, "a pre norm needs somewhere to write to"
        out.copy_(rms_norm_torch(x, pre))


@triton.jit
def normalised(x, mean_square, weight, eps, ROUNDS_FIRST: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """fp32 x over the root of mean_square + eps, times weight; rounded to dtype and handed back as fp32."""
    quotient = x * tl.rsqrt(mean_square + eps)
    if ROUNDS_FIRST:
        quotient = quotient.to(dtype).to(tl.float32)
    return (quotient * weight).to(dtype).to(tl.float32)


@triton.jit
def inverse_root(squares, rows, valid, size, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """1 / root of `RowRoot` for rows [n, 1] where `valid`, as [n, 1]."""
    parts = tl.arange(0, BLOCK)[None, :]
    found = tl.load(squares + rows * PARTS + parts, mask=valid & (parts < PARTS), other=0.0)
    return tl.rsqrt(tl.sum(found, 1) / size + eps)[:, None]


@triton.jit(do_not_specialize=["num_rows", "multiplier", "post_eps", "pre_eps", "root_size", "root_eps"])
def _add_norm_kernel(
    x,
    residual,
    post_weight,
    pre_weight,
    out,
    squares,
    root_size,
    root_eps,
    num_rows,
    part_stride,
    x_stride,
    residual_stride,
    out_stride,
    multiplier,
    post_eps,
    pre_eps,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_POST: tl.constexpr,
    HAS_PRE: tl.constexpr,
    POST_ROUNDS_FIRST: tl.constexpr,
    PRE_ROUNDS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = out.dtype.element_ty if SUMMED > 0 else x.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    within = columns < SIZE
    inside = (rows < num_rows) & within
    if HAS_POST:
        after = tl.load(post_weight + columns, mask=within, other=0.0).to(tl.float32)
    if HAS_PRE:
        before = tl.load(pre_weight + columns, mask=within, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    y = tl.load(x + rows * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if SUMMED > 0:
        for part in tl.static_range(1, SUMMED):
            y += tl.load(x + part * part_stride + rows * x_stride + columns, mask=inside, other=0.0)
        y = y.to(dtype).to(tl.float32)
    if PARTS > 0:
        y *= inverse_root(squares, rows, rows < num_rows, root_size, root_eps, PARTS, BLOCK_PARTS)
    if HAS_POST:
        mean_square = tl.sum(y * y, 1)[:, None] / SIZE
        y = normalised(y, mean_square, after, post_eps, POST_ROUNDS_FIRST, dtype)
    y = (y * multiplier).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + rows * residual_stride + columns
        total = (tl.load(at, mask=inside, other=0.0).to(tl.float32) + y).to(residual.dtype.element_ty)
        tl.store(at, total, mask=inside)
        y = total.to(tl.float32)
    if HAS_PRE:
        mean_square = tl.sum(y * y, 1)[:, None] / SIZE
        y = normalised(y, mean_square, before, pre_eps, PRE_ROUNDS_FIRST, dtype)
        tl.store(out + rows * out_stride + columns, y.to(dtype), mask=inside)


def add_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post: RMSNorm | None,
    pre: RMSNorm | None,
    multiplier: float,
    out: torch.Tensor | None,
    shape: tuple[int, int] | None = None,
    root: RowRoot | None = None,
) -> None:
    """Launch one program for every few rows; `shape` is (rows of a program, warps), None chooses."""
    num_rows, size = x.shape[-2:]
    if not num_rows:
        return
    rows, num_warps = shape or launch_shape(num_rows, size)
    assert x.dim() == 2 or out is not None, "parts do not say what they are rounded to"
    target = x if out is None else out
    _add_norm_kernel[(cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        x if post is None else post.weight,
        x if pre is None else pre.weight,
        target,
        x if root is None else root.squares,
        1 if root is None else root.size,
        0.0 if root is None else root.eps,
        num_rows,
        x.stride(0),
        x.stride(-2),
        x.stride(-2) if residual is None else residual.stride(0),
        target.stride(0),
        multiplier,
        0.0 if post is None else post.eps,
        0.0 if pre is None else pre.eps,
        SIZE=size,
        HAS_RESIDUAL=residual is not None,
        HAS_POST=post is not None,
        HAS_PRE=pre is not None,
        POST_ROUNDS_FIRST=post is not None and post.rounds_first,
        PRE_ROUNDS_FIRST=pre is not None and pre.rounds_first,
        ROWS=rows,
        BLOCK=next_power_of_2(size),
        SUMMED=len(x) if x.dim() > 2 else 0,
        **root_parts(root),
        num_warps=num_warps,
        **programmatic_launch(x),
    )


def root_parts(root: RowRoot | None) -> dict[str, int]:
    """Constants of a kernel that divides by a root, or does not."""
    parts = 0 if root is None else root.squares.shape[1]
    return {"PARTS": parts, "BLOCK_PARTS": next_power_of_2(max(parts, 1))}


def launch_shape(num_rows: int, size: int) -> tuple[int, int]:
    """(rows, warps) of a program."""
    return 1, max(1, min(16, next_power_of_2(size) // 256))


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post: RMSNorm | None,
    pre: RMSNorm | None,
    multiplier: float = 1.0,
    out: torch.Tensor | None = None,
    root: RowRoot | None = None,
) -> None:
    """Add x to the residual and write its norm to out; shapes and rules as above."""
    op = add_norm_triton if use_triton(x) and x.shape[-1] <= MAX_SIZE else add_norm_torch
    op(x, residual, post, pre, multiplier, out, root=root)
