"""The middle of a gated feed-forward network: out = act(gate) * up.

gate_up [num_rows, 2 * size] holds the gate in its first half and up in its second; out [num_rows, size]. act is one of
`ACTIVATIONS`, computed in fp32 and rounded to the dtype before the product, which is rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.sizes import cdiv, next_power_of_2
from model_states.kernels.triton_import import tl, triton

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def act_mul_torch(gate_up: torch.Tensor, act: str, out: torch.Tensor) -> None:
    """The formula above."""
    gate, up = gate_up.chunk(2, -1)
    torch.mul(ACTIVATIONS[act](gate), up, out=out)


@triton.jit
def silu(x) -> tl.tensor:
    """x sigmoid(x) of fp32 x, in half the instructions of a quotient, and as exact for tiny results."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * (root * root)


@triton.jit
def activated(x, ACT: tl.constexpr) -> tl.tensor:
    """act(x) of fp32 x."""
    if ACT == "silu":
        y = silu(x)
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 * (1 + tanh(y)) = sigmoid(2 y)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def _act_mul_kernel(
    gate_up,
    out,
    stride,
    SIZE: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    act = activated(gate, ACT).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + columns, (act * up).to(out.dtype.element_ty), mask=inside)


def act_mul_triton(
    gate_up: torch.Tensor, act: str, out: torch.Tensor, shape: tuple[int, int] | None = None
) -> None:
    """Launch one program for every `block` columns of a row; `shape` is (block, warps), None chooses."""
    num_rows, size = out.shape
    if not num_rows:
        return
    block, num_warps = shape or launch_shape(num_rows, size)
    _act_mul_kernel[(num_rows, cdiv(size, block))](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        ACT=act,
        BLOCK=block,
        num_warps=num_warps,
        **programmatic_launch(out),
    )


def launch_shape(num_rows: int, size: int) -> tuple[int, int]:
    """(columns, warps) of a program."""
    return min(1024, next_power_of_2(size)), 4


def act_mul(gate_up: torch.Tensor, act: str, out: torch.Tensor) -> None:
    """Write act(gate) * up to out; shapes as above, out contiguous."""
    op = act_mul_triton if use_triton(gate_up) else act_mul_torch
    op(gate_up, act, out)
