"""One token of each row through all that lies between the two products of a Mamba-2 mixer, in one kernel.

projected [num_rows, D + (D + 2 G N) + H] holds for each row its gate, the inputs of the convolution [x | b | c] and dt:

    [x | b | c] := silu(causal convolution)        `causal_conv`, the state of which is conv_pool
    y           := one step of the state space     `ssd_scan`, the state of which is ssm_pool
    out         := norm of y with the gate         `gated_norm`, or y silu(gate) without a norm

with D = H P channels in H heads, of which H / G share b and c. For decode steps alone (`RecurrentStep.is_decode`).
arrivals int32 [num_rows] is zero before and after. out [num_rows, D] of projected's dtype is zero for padding rows.

A program takes some heads of a row, one after another, so that it computes b and c once; the last one of a row to end
norms the row, and moves the inputs of the convolution that all heads share, which none of them reads any more.
`arrivals` counts them.
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
    x,
    old,
    taps,
    bias,
    d,
    mask,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    exact: tl.constexpr,
) -> tl.tensor:
    """silu(convolution) of channels d where `mask`: x points to a row's new inputs, old to its last W - 1.

    fp32 values rounded to `exact`, as they are between separate kernels.
    """
    # As one tile, so that its threads share the channels out; later each of them wants many.
    k, channel, inside = tl.arange(0, BLOCK_W)[None, :], d[:, None], mask[:, None]
    inputs = tl.load(old + k * SIZE + channel, mask=inside & (k < WIDTH - 1), other=0.0).to(tl.float32)
    inputs += tl.load(x + channel + 0 * k, mask=inside & (k == WIDTH - 1), other=0.0).to(tl.float32)
    factors = tl.load(taps + k * SIZE + channel, mask=inside & (k < WIDTH), other=0.0).to(tl.float32)
    acc = tl.sum(inputs * factors, 1)
    if HAS_BIAS:
        acc += tl.load(bias + d, mask=mask, other=0.0).to(tl.float32)
    return (acc * tl.sigmoid(acc)).to(exact).to(tl.float32)


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
    PIECES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    SIZE: tl.constexpr = NUM_HEADS * HEAD_SIZE
    SHARED: tl.constexpr = 2 * NUM_GROUPS * STATE_SIZE
    CONV_SIZE: tl.constexpr = SIZE + SHARED
    HEADS: tl.constexpr = NUM_HEADS // NUM_PROGRAMS
    exact: tl.constexpr = out.dtype.element_ty
    first_head, row = tl.program_id(0) * HEADS, tl.program_id(1).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    source = tl.load(source_rows + row).to(tl.int64)
    final = tl.load(final_rows + row).to(tl.int64)
    if PDL:
        gdc_wait()
    # Nothing of a padding row is read or kept, and its out is zero.
    num_p, has_n = tl.where(final > 0, HEAD_SIZE, 0), n < tl.where(final > 0, STATE_SIZE, 0)
    old_states = ssm_pool + source * (SIZE * STATE_SIZE)
    new_states = ssm_pool + final * (SIZE * STATE_SIZE)
    gate = projected + row * projected_stride
    inputs = gate + SIZE
    old = conv_pool + source * ((WIDTH - 1) * CONV_SIZE)
    new = conv_pool + final * ((WIDTH - 1) * CONV_SIZE)
    at_b = SIZE + first_head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE + n
    at_c = at_b + NUM_GROUPS * STATE_SIZE
    bs = _convolved(inputs, old, taps, bias, at_b, has_n, CONV_SIZE, WIDTH, BLOCK_W, HAS_BIAS, exact)
    cs = _convolved(inputs, old, taps, bias, at_c, has_n, CONV_SIZE, WIDTH, BLOCK_W, HAS_BIAS, exact)
    # The next states are on their way while one is worked on.
    for unit in tl.range(HEADS * PIECES, num_stages=NUM_STAGES):
        head = first_head + unit // PIECES
        p = unit % PIECES * BLOCK_P + tl.arange(0, BLOCK_P)
        has_p, d = p < num_p, head * HEAD_SIZE + p
        has_state, place = has_p[:, None] & has_n[None, :], d[:, None] * STATE_SIZE + n[None, :]
        state = tl.load(old_states + place, mask=has_state, other=0.0).to(tl.float32)
        raw = tl.load(inputs + CONV_SIZE + head, mask=final > 0, other=0.0).to(tl.float32)
        seconds = tl.minimum(tl.maximum(softplus(raw + tl.load(dt_bias + head)), dt_low), dt_high)
        xs = _convolved(inputs, old, taps, bias, d, has_p, CONV_SIZE, WIDTH, BLOCK_W, HAS_BIAS, exact)
        state = state * tl.exp(seconds * tl.load(a + head)) + (seconds * xs)[:, None] * bs[None, :]
        tl.store(new_states + place, state.to(ssm_pool.dtype.element_ty), mask=has_state)
        ys = tl.sum(state * cs[None, :], 1) + tl.load(skip + head) * xs
        tl.store(out + row * SIZE + d, ys.to(exact), mask=p < HEAD_SIZE)
    # Every thread has read the inputs that are moved now, and written its part of what the last program reads.
    tl.debug_barrier()
    own = tl.arange(0, BLOCK_OWN)
    has_own = own < num_p * HEADS
    own += first_head * HEAD_SIZE
    _move_inputs(inputs, old, new, own, has_own, CONV_SIZE, WIDTH)
    is_last = True
    if NUM_PROGRAMS > 1:
        is_last = tl.atomic_add(arrivals + row, 1) == NUM_PROGRAMS - 1
    if is_last:
        tl.store(arrivals + row, 0)
        shared = tl.arange(0, BLOCK_SHARED)
        has_shared = shared < tl.where(final > 0, SHARED, 0)
        _move_inputs(inputs, old, new, SIZE + shared, has_shared, CONV_SIZE, WIDTH)
        if final > 0:
            at = out + row * SIZE
            _norm_row(at, gate, norm_weight, eps, SIZE, GROUP_SIZE, HAS_NORM, GATE_LAST, BLOCK_GROUP)


class StepShape(NamedTuple):
    """Programs of a row, channels of a head that one takes at once, its warps, and states on their way to it."""

    num_programs: int
    block_p: int
    num_warps: int
    num_stages: int


def step_shape(num_rows: int, num_heads: int, num_groups: int, head_size: int) -> StepShape:
    """About four programs for each multiprocessor, each with some heads of one group."""
    heads = num_heads // num_groups
    wanted = min(max(512 // (num_rows * num_groups), 1), heads)
    by_group = next(count for count in range(wanted, heads + 1) if heads % count == 0)
    return StepShape(num_groups * by_group, min(triton.next_power_of_2(head_size), 64), 4, 3)


def mixer_step_triton(
    projected: torch.Tensor,
    weights: MixerWeights,
    conv_pool: torch.Tensor,
    ssm_pool: torch.Tensor,
    step: RecurrentStep,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    shape: StepShape | None = None,
) -> None:
    """Launch `StepShape.num_programs` programs for each row; without a shape, one is chosen."""
    num_heads, head_size, state_size = ssm_pool.shape[1:]
    width, conv_size = weights.conv_taps.shape
    size, norm, num_rows = num_heads * head_size, weights.norm, len(step.seq_lens)
    shared = conv_size - size
    num_groups = shared // (2 * state_size)
    group_size = size if norm is None else norm.group_size
    shape = shape or step_shape(num_rows, num_heads, num_groups, head_size)
    _mixer_step_kernel[(shape.num_programs, num_rows)](
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
        NUM_GROUPS=num_groups,
        HEAD_SIZE=head_size,
        STATE_SIZE=state_size,
        WIDTH=width,
        HAS_BIAS=weights.conv_bias is not None,
        HAS_NORM=norm is not None,
        GATE_LAST=norm is not None and norm.gate_last,
        GROUP_SIZE=group_size,
        PIECES=triton.cdiv(head_size, shape.block_p),
        NUM_PROGRAMS=shape.num_programs,
        NUM_STAGES=shape.num_stages,
        BLOCK_P=shape.block_p,
        BLOCK_N=triton.next_power_of_2(state_size),
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_GROUP=triton.next_power_of_2(group_size),
        BLOCK_OWN=triton.next_power_of_2(size // shape.num_programs),
        BLOCK_SHARED=triton.next_power_of_2(shared),
        num_warps=shape.num_warps,
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
