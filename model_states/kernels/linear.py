"""Products of few rows with a weight: bound by reading the weight once.

    linear(x, weight, bias, residual=r)           x . weight^T + bias + r
    norm_linear(x, norm_weight, eps, weight, b)   norm(x) . weight^T + b
    gate_up(x, norm_weight, eps, weight, name)    act(h . gate^T) * (h . up^T), h = norm(x), or x without a norm_weight
    norm(x) = norm_weight * round(x / sqrt(mean(x^2) + eps)), where round() is to x's dtype

x [n, k], weight [m, k] ([2 m, k] in gate_up: the rows of gate, then those of up), bias [m], residual [n, m],
norm_weight [k], all of x's dtype; returns [n, m] in x's dtype, a new tensor. Sums are kept in fp32. Any n is served:
above a few rows, on a CPU, and in other dtypes than bf16 and fp16 by torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x) of the formula above."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product, then what is added to it."""
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.T)
    out = F.linear(x, weight, bias)
    return out if residual is None else out + residual


def norm_linear_torch(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The norm, then the product."""
    return linear_torch(rms_norm_torch(x, norm_weight, eps), weight, bias)


def gate_up_torch(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, activation: str
) -> torch.Tensor:
    """Both products as one, then the activation."""
    normed = x if norm_weight is None else rms_norm_torch(x, norm_weight, eps)
    gate, up = F.linear(normed, weight).chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x . weight^T, plus bias and residual where given."""
    return linear_torch(x, weight, bias, residual)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return norm(x) . weight^T, plus bias where given."""
    return norm_linear_torch(x, norm_weight, eps, weight, bias)


def gate_up(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, activation: str
) -> torch.Tensor:
    """Return act(gate) * up of x, normed first unless `norm_weight` is None; activation is a key of `ACTIVATIONS`."""
    return gate_up_torch(x, norm_weight, eps, weight, activation)
