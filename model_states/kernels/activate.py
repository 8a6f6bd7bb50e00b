"""An activation in place: x = act(x), in fp32 and rounded once.

x of any shape, contiguous; act a key of `ACTIVATIONS`. For the results of large products this is bound by the memory,
but for the usual error function: so gelu(x) = x (1 + erf(x / sqrt 2)) / 2 is computed as

    max(x, 0) - |x| erfc(|x| / sqrt 2) / 2      erfc(z) = (a1 t + ... + a5 t^5) exp(-z^2), t = 1 / (1 + p z)

with p and a1 to a5 of Abramowitz and Stegun, 7.1.26, and an error below 1.5e-7, without loss where erf is near -1.
"""

from __future__ import annotations

import torch

from model_states.kernels.act_mul import ACTIVATIONS, activated
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.sizes import cdiv
from model_states.kernels.triton_import import tl, triton

_BLOCK = 2048


def activate_torch(x: torch.Tensor, act: str) -> torch.Tensor:
    """The formula above."""
    return x.copy_(ACTIVATIONS[act](x))


@triton.jit
def _gelu(x) -> tl.tensor:
    """gelu(x) of fp32 x."""
    a = tl.minimum(tl.abs(x), 30.0)  # from where on erfc is 0: infinity times 0 is none of it
    t = tl.fdiv(1.0, 1.0 + 0.3275911 * 0.7071067811865476 * a)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half_erfc = 0.5 * series * tl.exp2(-0.5 * 1.4426950408889634 * a * a)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - a * half_erfc


@triton.jit
def _activate_kernel(x, size, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(x + at, mask=at < size, other=0.0)
    wide = given.to(tl.float32)
    result = _gelu(wide) if ACT == "gelu" else activated(wide, ACT)
    tl.store(x + at, result.to(given.dtype), mask=at < size)


def activate_triton(x: torch.Tensor, act: str) -> torch.Tensor:
    """Launch over blocks of numbers."""
    size = x.numel()
    _activate_kernel[(cdiv(size, _BLOCK),)](
        x, size, ACT=act, BLOCK=_BLOCK, num_warps=4, **programmatic_launch(x)
    )
    return x


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """x, changed in place."""
    if not x.numel():
        return x
    return activate_triton(x, act) if use_triton(x) else activate_torch(x, act)
