"""A causal convolution of each channel over the tokens of its sequence, the last W - 1 inputs being its state.

    out[t, d] = act(bias[d] + sum_k weight[d, k] input[t - (W - 1) + k, d])

where inputs before the row's first token come from the state that the row left, pool[source, W - 1 + i, d] for i < 0.
act is SiLU or nothing; sums are fp32. x [num_tokens, D] with rows apart, weight [D, W] of any strides (channels beside
each other are read faster), bias [D] or None, out
[num_tokens, D]; pool [num_rows, W - 1, D] of any float dtype gives and takes states as `RecurrentStep` says. Rows of
any length and any number of computed tokens. Padding tokens of out are left alone, or zero in a decode step.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from model_states.kernels.act_mul import silu
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton
from model_states.recurrent_step import RecurrentStep

# A warp takes 8 channels a thread, and so many tokens that few inputs are read twice and registers suffice.
_BLOCK_T, _BLOCK_D = 4, 256
_BLOCK_D_STATE, _MAX_PARTS = 128, 16
# In a decode step each thread takes 4 channels, which is one load for each input.
_BLOCK_D_DECODE, _WARPS_DECODE = 1024, 8


def causal_conv_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    pool: torch.Tensor,
    step: RecurrentStep,
    out: torch.Tensor,
) -> None:
    """The formula above, row by row, in pieces that end where a state is kept."""
    if step.is_decode:
        _decode_torch(x, weight, bias, silu, pool, step, out)
        return
    for source, chunks in step.chunks(step.block_size):
        state = pool[source].float()
        for start, stop, targets in chunks:
            inputs = torch.cat([state, x[start:stop].float()])
            out[start:stop] = _convolve(inputs.T[None], weight, bias, silu)[0].T
            state = inputs[len(inputs) - len(state) :]
            for target in targets:
                pool[target] = state.to(pool.dtype)


def _decode_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    pool: torch.Tensor,
    step: RecurrentStep,
    out: torch.Tensor,
) -> None:
    """One token of each row, all rows at once."""
    is_real = (step.final_rows > 0)[:, None]
    inputs = torch.cat([pool[step.source_rows].float(), x[:, None].float()], 1)
    mixed = (inputs * weight.T.float()).sum(1)
    mixed = mixed if bias is None else mixed + bias.float()
    out.copy_((functional.silu(mixed) if silu else mixed) * is_real)
    # Padding rows have row 0 as their target, which stays zero.
    pool[step.final_rows] = (inputs[:, 1:] * is_real[..., None]).to(pool.dtype)


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """inputs fp32 [n, D, W - 1 + tokens] -> [n, D, tokens]."""
    wide_bias = None if bias is None else bias.float()
    out = functional.conv1d(inputs, weight[:, None].float(), wide_bias, groups=len(weight))
    return functional.silu(out) if silu else out


@triton.jit
def _causal_conv_kernel(
    x,
    x_stride,
    weight,
    d_stride,
    k_stride,
    bias,
    pool,
    query_start_loc,
    source_rows,
    token_rows,
    out,
    num_tokens,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    begin = tl.program_id(0) * BLOCK_T
    end = tl.minimum(begin + BLOCK_T, num_tokens)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < SIZE
    factors = ()
    for k in tl.static_range(WIDTH):
        factor = tl.load(weight + d * d_stride + k * k_stride, mask=inside, other=0.0)
        factors += (factor.to(tl.float32),)  # type: ignore[assignment]
    added = tl.zeros((BLOCK_D,), tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    row, last_row = tl.load(token_rows + begin), tl.load(token_rows + end - 1)
    start = tl.load(query_start_loc + tl.maximum(row, 0))
    is_whole = (row >= 0) & (row == last_row) & (end - begin == BLOCK_T)
    if is_whole & (begin - (WIDTH - 1) >= start):
        # Most tiles: one row's tokens, which see none that a state would have to hold. All inputs are asked for before
        # anything is written, since no read may pass a write.
        at = x + begin.to(tl.int64) * x_stride + d
        inputs = ()
        for i in tl.static_range(BLOCK_T + WIDTH - 1):
            new = tl.load(at + (i - (WIDTH - 1)) * x_stride, mask=inside, other=0.0)
            inputs += (new,)  # type: ignore[assignment]
        for i in tl.static_range(BLOCK_T):
            acc = added
            for k in tl.static_range(WIDTH):
                acc += inputs[i + k].to(tl.float32) * factors[k]
            if SILU:
                acc = silu(acc)
            target = out + (begin + i).to(tl.int64) * SIZE + d
            tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        for offset in range(end - begin):
            token = begin + offset
            row = tl.load(token_rows + token)
            if row >= 0:
                start = tl.load(query_start_loc + row)
                source = tl.load(source_rows + row).to(tl.int64) * (WIDTH - 1) * SIZE
                acc = added
                for k in tl.static_range(WIDTH):
                    i = token - start - (WIDTH - 1) + k
                    new_at = x + (start + i).to(tl.int64) * x_stride + d
                    new = tl.load(new_at, mask=d < tl.where(i >= 0, SIZE, 0), other=0.0)
                    old_at = pool + source + (WIDTH - 1 + i) * SIZE + d
                    old = tl.load(old_at, mask=d < tl.where(i < 0, SIZE, 0), other=0.0)
                    acc += (new.to(tl.float32) + old.to(tl.float32)) * factors[k]
                if SILU:
                    acc = silu(acc)
                tl.store(out + token.to(tl.int64) * SIZE + d, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep_inputs(
    x, x_stride, pool, source, target, start, num_new, d, SIZE: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    """Write the state after `num_new` tokens of a row; each lane keeps to its channel, so source may be target."""
    for k in tl.static_range(WIDTH - 1):
        i = num_new - (WIDTH - 1) + k
        new = tl.load(
            x + (start + i).to(tl.int64) * x_stride + d, mask=d < tl.where(i >= 0, SIZE, 0), other=0.0
        )
        old = tl.load(
            pool + (source * (WIDTH - 1) + (WIDTH - 1) + i) * SIZE + d,
            mask=d < tl.where(i < 0, SIZE, 0),
            other=0.0,
        )
        value = new.to(pool.dtype.element_ty) + old
        tl.store(pool + (target * (WIDTH - 1) + k) * SIZE + d, value, mask=d < SIZE)


@triton.jit
def _keep_states_kernel(
    x,
    x_stride,
    pool,
    query_start_loc,
    seq_lens,
    source_rows,
    final_rows,
    scratch_rows,
    block_table,
    block_table_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    row, part = tl.program_id(0), tl.program_id(2)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - start
    if num_tokens > 0:
        end = tl.load(seq_lens + row)
        computed = end - num_tokens
        source = tl.load(source_rows + row).to(tl.int64)
        final = tl.load(final_rows + row).to(tl.int64)
        scratch = tl.load(scratch_rows + row).to(tl.int64)
        num_blocks = (end - 1) // BLOCK_SIZE - computed // BLOCK_SIZE
        if part == 0:
            if scratch > 0:
                for i in range(num_tokens - 1):
                    _keep_inputs(x, x_stride, pool, source, scratch + i, start, i + 1, d, SIZE, WIDTH)
            _keep_inputs(x, x_stride, pool, source, final, start, num_tokens, d, SIZE, WIDTH)
        # Backwards, and the first block comes last in part 0: its row may be the source, which the others do not read.
        num_mine = tl.cdiv(num_blocks - part, PARTS)
        for i in range(num_mine):
            block = computed // BLOCK_SIZE + 1 + part + (num_mine - 1 - i) * PARTS
            target = tl.load(block_table + row.to(tl.int64) * block_table_stride + block - 1).to(tl.int64)
            num_new = block * BLOCK_SIZE - computed
            _keep_inputs(x, x_stride, pool, source, target, start, num_new, d, SIZE, WIDTH)


@triton.jit
def _decode_kernel(
    x,
    x_stride,
    weight,
    d_stride,
    k_stride,
    bias,
    pool,
    source_rows,
    final_rows,
    out,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < SIZE
    if PDL:
        gdc_launch_dependents()
    source = tl.load(source_rows + row).to(tl.int64) * (WIDTH - 1) * SIZE
    target = tl.load(final_rows + row).to(tl.int64) * (WIDTH - 1) * SIZE
    is_real = d < tl.where(target > 0, SIZE, 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    # The step before wrote the state, so it may be read ahead of the product that makes x.
    inputs = ()
    for k in tl.static_range(WIDTH - 1):
        old = tl.load(pool + source + k * SIZE + d, mask=is_real, other=0.0)
        factor = tl.load(weight + d * d_stride + k * k_stride, mask=inside, other=0.0).to(tl.float32)
        acc += old.to(tl.float32) * factor
        inputs += (old,)  # type: ignore[assignment]
    factor = tl.load(weight + d * d_stride + (WIDTH - 1) * k_stride, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    new = tl.load(x + row * x_stride + d, mask=is_real, other=0.0)
    acc += new.to(tl.float32) * factor
    for k in tl.static_range(WIDTH - 2):
        tl.store(pool + target + k * SIZE + d, inputs[k + 1], mask=is_real)
    tl.store(pool + target + (WIDTH - 2) * SIZE + d, new.to(pool.dtype.element_ty), mask=is_real)
    if SILU:
        acc = silu(acc)
    tl.store(out + row * SIZE + d, tl.where(is_real, acc, 0.0).to(out.dtype.element_ty), mask=inside)


def causal_conv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    pool: torch.Tensor,
    step: RecurrentStep,
    out: torch.Tensor,
) -> None:
    """Outputs token by token, then states row by row; a decode step does both at once."""
    size, width = weight.shape
    given = (x, x.stride(0), weight, *weight.stride(), weight if bias is None else bias, pool)
    flags = {"SIZE": size, "WIDTH": width, "HAS_BIAS": bias is not None, "SILU": silu}
    num_rows = len(step.seq_lens)
    if step.is_decode:
        _decode_kernel[(num_rows, triton.cdiv(size, _BLOCK_D_DECODE))](
            *given,
            step.source_rows,
            step.final_rows,
            out,
            **flags,
            BLOCK_D=_BLOCK_D_DECODE,
            num_warps=_WARPS_DECODE,
            **programmatic_launch(x),
        )
        return
    _causal_conv_kernel[(triton.cdiv(len(x), _BLOCK_T), triton.cdiv(size, _BLOCK_D))](
        *given,
        step.query_start_loc,
        step.source_rows,
        step.token_rows,
        out,
        len(x),
        **flags,
        BLOCK_T=_BLOCK_T,
        BLOCK_D=_BLOCK_D,
        num_warps=1,
    )
    # Long rows keep many states. A block's inputs must be new ones for parts to take turns.
    parts = min(len(x) // (num_rows * step.block_size), _MAX_PARTS) if step.block_size >= width else 1
    parts = triton.next_power_of_2(max(parts, 1))
    _keep_states_kernel[(num_rows, triton.cdiv(size, _BLOCK_D_STATE), parts)](
        x,
        x.stride(0),
        pool,
        step.query_start_loc,
        step.seq_lens,
        step.source_rows,
        step.final_rows,
        step.scratch_rows,
        step.block_table,
        step.block_table.stride(0),
        SIZE=size,
        WIDTH=width,
        BLOCK_SIZE=step.block_size,
        BLOCK_D=_BLOCK_D_STATE,
        PARTS=parts,
    )


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    pool: torch.Tensor,
    step: RecurrentStep,
    out: torch.Tensor,
) -> None:
    """Write `out`, and the states of the step to `pool`."""
    op = causal_conv_triton if use_triton(x) else causal_conv_torch
    op(x, weight, bias, silu, pool, step, out)
