"""One token of each row through the state space of Mamba-2; the formula and the shapes are those of `ssd_scan`."""

from __future__ import annotations

import torch

from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import RecurrentStep
from model_states_mamba.kernels.softplus import softplus
from model_states_mamba.kernels.ssd_parts import (
    Gated,
    SsdWeights,
    by_head,
    constants,
    gate_arguments,
    gated,
    num_pieces,
    time_steps,
)


def ssd_decode_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
) -> None:
    """One token of each row, all rows at once."""
    is_real = (step.final_rows > 0)[:, None, None]
    seconds, x = time_steps(dt, weights)[..., None], x.float()
    b, c = by_head(b, x.shape[1]), by_head(c, x.shape[1])
    state = pool[step.source_rows].float() * (seconds * weights.a[:, None]).exp()[..., None]
    state += (seconds * x)[..., None] * b[:, :, None]
    y.copy_((torch.einsum("thpn,thn->thp", state, c) + weights.d[:, None] * x) * is_real)
    # Padding rows have row 0 as their target, which stays zero.
    pool[step.final_rows] = (state * is_real[..., None]).to(pool.dtype)


@triton.jit
def _ssd_decode_kernel(
    x,
    dt,
    b,
    c,
    a,
    d,
    dt_bias,
    dt_low,
    dt_high,
    pool,
    source_rows,
    final_rows,
    y,
    gate,
    gate_stride,
    norm_weight,
    squares,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_LAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    # Neighbours are heads of one row, whose states are neighbours too.
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = head // (NUM_HEADS // NUM_GROUPS)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    pool_stride = tl.full((), NUM_HEADS * HEAD_SIZE * STATE_SIZE, tl.int64)
    source = tl.load(source_rows + row).to(tl.int64)
    final = tl.load(final_rows + row).to(tl.int64)
    # Nothing of a padding row is read or kept, and its y is zero.
    has_p, has_n = p < tl.where(final > 0, HEAD_SIZE, 0), n < STATE_SIZE
    has_state = has_p[:, None] & has_n[None, :]
    place = (head * HEAD_SIZE + p[:, None]) * STATE_SIZE + n[None, :]
    # The step before wrote the state: it may be read ahead of the convolution, which comes just before.
    state = tl.load(pool + source * pool_stride + place, mask=has_state, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    raw = tl.load(dt + row * dt_stride + head, mask=final > 0, other=0.0).to(tl.float32)
    seconds = tl.minimum(tl.maximum(softplus(raw + tl.load(dt_bias + head)), dt_low), dt_high)
    xs = tl.load(x + row * x_stride + head * HEAD_SIZE + p, mask=has_p, other=0.0).to(tl.float32)
    bs = tl.load(b + row * b_stride + group * STATE_SIZE + n, mask=has_n, other=0.0).to(tl.float32)
    cs = tl.load(c + row * c_stride + group * STATE_SIZE + n, mask=has_n, other=0.0).to(tl.float32)
    state = state * tl.exp(seconds * tl.load(a + head)) + (seconds * xs)[:, None] * bs[None, :]
    tl.store(pool + final * pool_stride + place, state.to(pool.dtype.element_ty), mask=has_state)
    ys = tl.sum(state * cs[None, :], 1) + tl.load(d + head) * xs
    at = head * HEAD_SIZE + p
    squares_at = squares + (row * NUM_HEADS + head) * tl.num_programs(2) + tl.program_id(2)
    gate_at = gate + row * gate_stride + at
    ys = gated(ys, gate_at, norm_weight + at, squares_at, has_p, True, HAS_GATE, HAS_NORM, GATE_LAST)
    tl.store(y + row * (NUM_HEADS * HEAD_SIZE) + at, ys.to(y.dtype.element_ty), mask=p < HEAD_SIZE)


# On an H200, 64 channels took 101 us with 8 warps and 108 with 4; 32 channels 51 with one and 55 with 4. What 8 warps
# hold fits in 64 registers of each thread, which lets four programs run on a multiprocessor.
_WIDE = {"num_warps": 8, "maxnreg": 64}


def ssd_decode_triton(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
    after: Gated | None = None,
) -> None:
    """Launch one program for each row, head and piece of a head."""
    num_heads, head_size = pool.shape[1:3]
    _ssd_decode_kernel[(num_heads, len(step.seq_lens), num_pieces(head_size))](
        *(x, dt, b, c, weights.a, weights.d, weights.dt_bias, *weights.dt_limits, pool),
        step.source_rows,
        step.final_rows,
        y,
        *gate_arguments(x, after),
        *(x.stride(0), dt.stride(0), b.stride(0), c.stride(0)),
        **constants(pool, b, after),
        **(_WIDE if head_size > 32 else {"num_warps": 1}),
        **programmatic_launch(x),
    )
