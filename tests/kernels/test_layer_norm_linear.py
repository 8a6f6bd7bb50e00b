"""Products behind a layer norm: Triton equals the torch twin, and the twin torch's own functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from model_states.kernels.act_mul import ACTIVATIONS
from model_states.kernels.layer_norm import LayerNorm
from model_states.kernels.layer_norm_linear import (
    layer_norm_linear,
    layer_norm_linear_torch,
    layer_norm_linear_triton,
)
from model_states.kernels.linear import LinearConfig

# n, m, k and a cut that leaves a rest in each of them
SHAPES = [
    (1, 40, 64, LinearConfig(16, 64, 2)),
    (3, 18, 72, LinearConfig(8, 128, 4)),
    (5, 7, 40, LinearConfig(4, 64, 1)),
]


class Inputs:
    """Random operands; x is a slice of rows that hold NaN beside it."""

    def __init__(self, n: int, m: int, k: int, dtype: torch.dtype, device: torch.device, parts: str) -> None:
        generator = torch.Generator().manual_seed(n + m + k)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        wide = torch.full((n, k + 24), float("nan"), dtype=dtype, device=device)
        wide[:, 8 : 8 + k] = 2 + normal(n, k)
        self.x = wide[:, 8 : 8 + k]
        self.weight = (normal(m, k) / 8).to(dtype)
        self.bias = normal(m).to(dtype) if "bias" in parts else None
        shift = normal(k) if "shift" in parts else None
        self.norm = (
            LayerNorm(normal(k).to(dtype), normal(k).to(dtype), 1e-5, shift) if "norm" in parts else None
        )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:3])))
@pytest.mark.parametrize("parts", ["", "norm", "bias", "norm shift", "norm bias shift"])
@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
def test_kernel_equals_twin(
    device: torch.device, shape: tuple[int, int, int, LinearConfig], parts: str, activation: str | None
) -> None:
    *sizes, config = shape
    i = Inputs(*sizes, torch.float32, device, parts)
    expected = layer_norm_linear_torch(i.x, i.norm, i.weight, i.bias, activation)
    found = layer_norm_linear_triton(i.x, i.norm, i.weight, i.bias, activation, config)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_twin_is_torchs_functions(device: torch.device, activation: str | None) -> None:
    i = Inputs(9, 12, 40, torch.float32, device, "norm bias shift")
    assert i.norm is not None
    h = functional.layer_norm(i.x + i.norm.shift, (40,), i.norm.weight, i.norm.bias, i.norm.eps)
    expected = functional.linear(h, i.weight, i.bias)
    if activation is not None:
        expected = ACTIVATIONS[activation](expected)
    found = layer_norm_linear(i.x, i.norm, i.weight, i.bias, activation)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_is_rounded_behind_the_norm_and_at_the_end(device: torch.device) -> None:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bf16 products
    i = Inputs(3, 18, 72, half, device, "norm bias shift")
    found = layer_norm_linear_triton(i.x, i.norm, i.weight, i.bias, "gelu", SHAPES[1][3])
    assert found.dtype == half
    wide = LayerNorm(i.norm.weight.double(), i.norm.bias.double(), i.norm.eps, i.norm.shift.double())
    h = functional.layer_norm(i.x.double() + wide.shift, (72,), wide.weight, wide.bias, wide.eps).to(half)
    expected = functional.gelu(functional.linear(h.double(), i.weight.double(), i.bias.double()))
    torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=4e-3)
