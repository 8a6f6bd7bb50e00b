"""One token of each row through all that lies between the two products of a Mamba-2 mixer, in one kernel.

projected [num_rows, D + (D + 2 G N) + H] holds for each row its gate, the inputs of the convolution [x | b | c] and dt:

    [x | b | c] := silu(causal convolution)        `causal_conv`, the state of which is conv_pool
    y           := one step of the state space     `ssd_scan`, the state of which is ssm_pool
    out         := norm of y with the gate         `gated_norm`, or y silu(gate) without a norm

with D = H P channels in H heads, of which H / G share b and c. For decode steps alone (`RecurrentStep.is_decode`).
arrivals int32 [num_rows] is zero before and after. out [num_rows, D] of projected's dtype is zero for padding rows.

A program takes a head of a row, or a piece of it; the last one of a row to come norms the row, and moves the inputs of
the convolution that all heads share, which none of them reads any more. `arrivals` counts them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from model_states.kernels.causal_conv import causal_conv_torch
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import RecurrentStep
from model_states_mamba.kernels.gated_norm import GatedNorm, gated_norm_torch
from model_states_mamba.kernels.softplus import softplus
from model_states_mamba.kernels.ssd_scan import SsdWeights, ssd_scan_torch


class MixerWeights(NamedTuple):
    """Parameters of one mixer. conv_weight [D + 2 G N, W], conv_taps the same as [W, D + 2 G N], both contiguous."""

    conv_weight: torch.Tensor
    conv_taps: torch.Tensor
    conv_bias: torch.Tensor | None
    ssd: SsdWeights
    norm: GatedNorm | None


def mixer_step_torch(
    projected: torch.Tensor,
    weights: MixerWeights,
    conv_pool: torch.Tensor,
    ssm_pool: torch.Tensor,
    step: RecurrentStep,
    arrivals: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The three lines above."""
    num_heads, head_size, state_size = ssm_pool.shape[1:]
    size = num_heads * head_size
    by_group = (len(weights.conv_weight) - size) // 2
    gate, mixed, dt = projected.split([size, size + 2 * by_group, num_heads], -1)
    convolved = torch.empty_like(mixed, memory_format=torch.contiguous_format)
    causal_conv_torch(mixed, weights.conv_weight, weights.conv_bias, True, conv_pool, step, convolved)
    x, b, c = convolved.split([size, by_group, by_group], -1)
    b, c = (part.unflatten(1, (-1, state_size)) for part in (b, c))
    y = out.view(-1, num_heads, head_size)
    ssd_scan_torch(x.unflatten(1, (num_heads, head_size)), dt, b, c, weights.ssd, ssm_pool, step, y)
    if weights.norm is None:
        out.copy_(out.float() * functional.silu(gate.float()))
    else:
        gated_norm_torch(out, gate, weights.norm, out)


@triton.jit
def _convolved(
    x, old, taps, bias, d, mask, SIZE: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr
) -> tl.tensor:
    """silu(convolution) of channels d where `mask`, fp32: x points to a row's new inputs, old to its last W - 1."""
    acc = tl.load(x + d, mask=mask, other=0.0).to(tl.float32)
    acc *= tl.load(taps + (WIDTH - 1) * SIZE + d, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(WIDTH - 1):
        value = tl.load(old + k * SIZE + d, mask=mask, other=0.0).to(tl.float32)
        acc += value * tl.load(taps + k * SIZE + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + d, mask=mask, other=0.0).to(tl.float32)
    return acc * tl.sigmoid(acc)


@triton.jit
def _move_inputs(x, old, new, d, mask, SIZE: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """The last W - 1 inputs of channels d one token on; old may be new."""
    for k in tl.static_range(WIDTH - 1):
        if k < WIDTH - 2:
            value = tl.load(old + (k + 1) * SIZE + d, mask=mask, other=0.0)
        else:
            value = tl.load(x + d, mask=mask, other=0.0).to(new.dtype.element_ty)
        tl.store(new + k * SIZE + d, value, mask=mask)


@triton.jit
def _norm_row(
    y,
    gate,
    weight,
    eps,
    SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Norm and gate a row in place, group by group."""
    within = tl.arange(0, BLOCK)
    inside = within < GROUP_SIZE
    for group in range(SIZE // GROUP_SIZE):
        d = group * GROUP_SIZE + within
        # Other programs wrote it: not from this one's own cache.
        value = tl.load(y + d, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        gates = tl.load(gate + d, mask=inside, other=0.0).to(tl.float32)
        factor = gates * tl.sigmoid(gates)
        if not GATE_LAST:
            value *= factor
        if HAS_NORM:
            value *= tl.rsqrt(tl.sum(value * value, 0) / GROUP_SIZE + eps)
            value *= tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        if GATE_LAST:
            value *= factor
        tl.store(y + d, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _mixer_step_kernel(
    projected,
    projected_stride,
    taps,
    bias,
    a,
    skip,
    dt_bias,
    dt_low,
    dt_high,
    norm_weight,
    eps,
    conv_pool,
    ssm_pool,
    source_rows,
    final_rows,
    arrivals,
    out,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_LAST: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    # Neighbours are pieces and heads of one row, whose states are neighbours too.
    PIECES: tl.constexpr = (HEAD_SIZE + BLOCK_P - 1) // BLOCK_P
    head, row = tl.program_id(0) // PIECES, tl.program_id(1).to(tl.int64)
    SIZE: tl.constexpr = NUM_HEADS * HEAD_SIZE
    SHARED: tl.constexpr = 2 * NUM_GROUPS * STATE_SIZE
    CONV_SIZE: tl.constexpr = SIZE + SHARED
    p = tl.program_id(0) % PIECES * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    source = tl.load(source_rows + row).to(tl.int64)
    final = tl.load(final_rows + row).to(tl.int64)
    # Nothing of a padding row is read or kept, and its out is zero.
    has_p, has_n = p < tl.where(final > 0, HEAD_SIZE, 0), n < tl.where(final > 0, STATE_SIZE, 0)
    has_state = has_p[:, None] & has_n[None, :]
    place = (head * HEAD_SIZE + p[:, None]) * STATE_SIZE + n[None, :]
    # The step before wrote the state: it may be read ahead of the product, which comes just before.
    state = tl.load(ssm_pool + source * (SIZE * STATE_SIZE) + place, mask=has_state, other=0.0).to(tl.float32)
    decay_rate, bias_of_dt = tl.load(a + head), tl.load(dt_bias + head)
    if PDL:
        gdc_wait()
    gate = projected + row * projected_stride
    inputs = gate + SIZE
    old = conv_pool + source * ((WIDTH - 1) * CONV_SIZE)
    new = conv_pool + final * ((WIDTH - 1) * CONV_SIZE)
    raw = tl.load(inputs + CONV_SIZE + head, mask=final > 0, other=0.0).to(tl.float32)
    seconds = tl.minimum(tl.maximum(softplus(raw + bias_of_dt), dt_low), dt_high)
    d = head * HEAD_SIZE + p
    at_b = SIZE + head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE + n
    at_c = at_b + NUM_GROUPS * STATE_SIZE
    xs = _convolved(inputs, old, taps, bias, d, has_p, CONV_SIZE, WIDTH, HAS_BIAS)
    bs = _convolved(inputs, old, taps, bias, at_b, has_n, CONV_SIZE, WIDTH, HAS_BIAS)
    cs = _convolved(inputs, old, taps, bias, at_c, has_n, CONV_SIZE, WIDTH, HAS_BIAS)
    # As between separate kernels, the convolution is rounded.
    exact: tl.constexpr = out.dtype.element_ty
    xs, bs, cs = (
        xs.to(exact).to(tl.float32),
        bs.to(exact).to(tl.float32),
        cs.to(exact).to(tl.float32),
    )
    state = state * tl.exp(seconds * decay_rate) + (seconds * xs)[:, None] * bs[None, :]
    kept = state.to(ssm_pool.dtype.element_ty)
    tl.store(ssm_pool + final * (SIZE * STATE_SIZE) + place, kept, mask=has_state)
    ys = tl.sum(state * cs[None, :], 1) + tl.load(skip + head) * xs
    tl.store(out + row * SIZE + d, ys.to(exact), mask=p < HEAD_SIZE)
    # Every thread has read the inputs that are moved now, and written its part of what the last program reads.
    tl.debug_barrier()
    _move_inputs(inputs, old, new, d, has_p, CONV_SIZE, WIDTH)
    if tl.atomic_add(arrivals + row, 1) == NUM_HEADS * PIECES - 1:
        tl.store(arrivals + row, 0)
        shared = tl.arange(0, BLOCK_SHARED)
        has_shared = shared < tl.where(final > 0, SHARED, 0)
        _move_inputs(inputs, old, new, SIZE + shared, has_shared, CONV_SIZE, WIDTH)
        if final > 0:
            at = out + row * SIZE
            _norm_row(at, gate, norm_weight, eps, SIZE, GROUP_SIZE, HAS_NORM, GATE_LAST, BLOCK_GROUP)


def mixer_step_triton(
    projected: torch.Tensor,
    weights: MixerWeights,
    conv_pool: torch.Tensor,
    ssm_pool: torch.Tensor,
    step: RecurrentStep,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    shape: tuple[int, int] | None = None,
) -> None:
    """Launch one program for each row and piece of a head; `shape` is (channels of a piece, warps), None chooses."""
    num_heads, head_size, state_size = ssm_pool.shape[1:]
    width, conv_size = weights.conv_taps.shape
    size, norm = num_heads * head_size, weights.norm
    shared = conv_size - size
    group_size = size if norm is None else norm.group_size
    block_p, num_warps = shape or (min(triton.next_power_of_2(head_size), 64), 4)
    _mixer_step_kernel[(num_heads * triton.cdiv(head_size, block_p), len(step.seq_lens))](
        projected,
        projected.stride(0),
        weights.conv_taps,
        weights.conv_taps if weights.conv_bias is None else weights.conv_bias,
        weights.ssd.a,
        weights.ssd.d,
        weights.ssd.dt_bias,
        *weights.ssd.dt_limits,
        weights.ssd.d if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        conv_pool,
        ssm_pool,
        step.source_rows,
        step.final_rows,
        arrivals,
        out,
        NUM_HEADS=num_heads,
        NUM_GROUPS=shared // (2 * state_size),
        HEAD_SIZE=head_size,
        STATE_SIZE=state_size,
        WIDTH=width,
        HAS_BIAS=weights.conv_bias is not None,
        HAS_NORM=norm is not None,
        GATE_LAST=norm is not None and norm.gate_last,
        GROUP_SIZE=group_size,
        BLOCK_P=block_p,
        BLOCK_N=triton.next_power_of_2(state_size),
        BLOCK_GROUP=triton.next_power_of_2(group_size),
        BLOCK_SHARED=triton.next_power_of_2(shared),
        num_warps=num_warps,
        **programmatic_launch(out),
    )


def mixer_step(
    projected: torch.Tensor,
    weights: MixerWeights,
    conv_pool: torch.Tensor,
    ssm_pool: torch.Tensor,
    step: RecurrentStep,
    arrivals: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write `out`, and the states of the step to the pools."""
    op = mixer_step_triton if use_triton(out) else mixer_step_torch
    op(projected, weights, conv_pool, ssm_pool, step, arrivals, out)
