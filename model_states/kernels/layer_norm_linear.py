"""Products of a few rows with a weight, behind a layer norm and before an activation, in one kernel.

    out = act(h . weight^T + bias)        h = layer_norm(x + shift)

The norm is that of `layer_norm`, rounded to x's dtype as there. x [n, k] with any stride of rows; shift fp32 [k] or
None; weight [m, k], contiguous; bias [m] or None; act a key of `ACTIVATIONS` or None; returns [n, m], a new tensor of
x's dtype. Sums are kept in fp32, and with bias and activation rounded once.

For a row or a few each of the three is over before the next could be launched. Up to `MAX_ROWS` rows of bf16 or fp16 on
a GPU, of at most `MAX_COLUMNS` columns, are served by the kernel; everything else by a kernel or two for each part,
which round in between. The cut is that of `linear`: it depends on the shapes alone. A program holds all columns, and
asks for its rows of weight before it waits for the kernel before it: what runs just before may not be writing the
weight, the biases or the shift.
"""

from __future__ import annotations

import torch

from model_states.kernels.act_mul import activated
from model_states.kernels.activate import activate
from model_states.kernels.dispatch import use_triton
from model_states.kernels.layer_norm import LayerNorm, layer_norm
from model_states.kernels.linear import LinearConfig, linear, linear_config
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton

MAX_ROWS = 8
MAX_COLUMNS = 2048


def layer_norm_linear_torch(
    x: torch.Tensor,
    norm: LayerNorm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The formula above, each step with what there is for it."""
    h = x
    if norm is not None:
        h = torch.empty_like(x, memory_format=torch.contiguous_format)
        layer_norm(x, norm.shift, norm.weight, norm.bias, norm.eps, h)
    out = linear(h, weight, bias)
    return out if activation is None else activate(out, activation)


@triton.jit(do_not_specialize=["n", "m", "eps"])
def _layer_norm_linear_kernel(
    out,
    x,
    shift,
    norm_weight,
    norm_bias,
    weight,
    bias,
    eps,
    n,
    m,
    x_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    tokens = tl.arange(0, ROWS)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Part s of the columns is warp s's, as in `linear`.
    PART: tl.constexpr = BLOCK_K // SPLIT
    cols = tl.arange(0, SPLIT)[:, None] * PART + tl.arange(0, PART)[None, :]
    is_col, is_row = cols < K, rows < m
    w_at = weight + rows.to(tl.int64)[None, :, None] * K + cols[:, None, :]
    w = tl.load(w_at, mask=is_row[None, :, None] & is_col[:, None, :], other=0.0)
    added = tl.zeros([ROWS, BLOCK_M], tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    if HAS_NORM:
        factor = tl.load(norm_weight + cols, mask=is_col, other=0.0).to(tl.float32)
        offset = tl.load(norm_bias + cols, mask=is_col, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        missing = tl.load(shift + cols, mask=is_col, other=0.0)
    if PDL:
        gdc_wait()

    inside = (tokens < n)[None, :, None] & is_col[:, None, :]
    tile = tl.load(x + tokens[None, :, None] * x_stride + cols[:, None, :], mask=inside, other=0.0)
    if HAS_NORM:
        y = tile.to(tl.float32)
        if HAS_SHIFT:
            y += missing[:, None, :]
        mean = tl.sum(tl.sum(y, 2), 0) / K
        centred = tl.where(inside, y - mean[None, :, None], 0.0)
        scale = tl.rsqrt(tl.sum(tl.sum(centred * centred, 2), 0) / K + eps)
        tile = (centred * scale[None, :, None] * factor[:, None, :] + offset[:, None, :]).to(w.dtype)
    acc = tl.dot(tile, tl.permute(w, (0, 2, 1)), input_precision="ieee")
    total = tl.sum(acc, 0) + added
    if ACTIVATION is not None:
        total = activated(total, ACTIVATION)
    mask = (tokens < n)[:, None] & is_row[None, :]
    tl.store(out + tokens[:, None] * m + rows[None, :], total.to(out.dtype.element_ty), mask=mask)


def layer_norm_linear_triton(
    x: torch.Tensor,
    norm: LayerNorm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Launch one program for every `block_m` rows of weight."""
    (n, k), m = x.shape, weight.shape[0]
    config = config or linear_config(n, m, k)
    assert config.block_k >= k, "a program holds all columns"
    out = x.new_empty(n, m)
    shift = None if norm is None else norm.shift
    _layer_norm_linear_kernel[(triton.cdiv(m, config.block_m),)](
        out,
        x,
        shift,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        weight,
        bias,
        0.0 if norm is None else norm.eps,
        n,
        m,
        x.stride(0),
        K=k,
        ROWS=triton.next_power_of_2(n),
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        SPLIT=config.num_warps,
        HAS_NORM=norm is not None,
        HAS_SHIFT=shift is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        num_warps=config.num_warps,
        num_stages=1,
        **programmatic_launch(x),
    )
    return out


def layer_norm_linear(
    x: torch.Tensor,
    norm: LayerNorm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Return the formula above; norm None: h = x."""
    (n, k), is_half = x.shape, x.dtype in (torch.bfloat16, torch.float16)
    fits = 0 < n <= MAX_ROWS and k <= MAX_COLUMNS and is_half and x.dtype == weight.dtype and x.stride(1) == 1
    takes = use_triton(x) and fits and weight.is_contiguous()
    op = layer_norm_linear_triton if takes else layer_norm_linear_torch
    return op(x, norm, weight, bias, activation)
