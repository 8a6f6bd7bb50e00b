"""`layer_norm`: Triton equals the torch twin, and the twin torch's own norm of the shifted rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from model_states.kernels.layer_norm import layer_norm_torch, layer_norm_triton


@pytest.mark.parametrize("size", [5, 48, 257])
@pytest.mark.parametrize("has_shift", [False, True])
def test_kernel_and_twin(size, has_shift, device):
    torch.manual_seed(size)
    wide = 3 + 2 * torch.randn(4, size + 3, device=device)
    x = wide[:, :size]
    shift = torch.randn(size, device=device) if has_shift else None
    weight, bias = torch.randn(2, size, device=device)
    outs = [torch.full((4, size), 7777.0, device=device) for _ in range(2)]
    layer_norm_torch(x, shift, weight, bias, 1e-5, outs[0])
    layer_norm_triton(x, shift, weight, bias, 1e-5, outs[1])
    expected = functional.layer_norm(x if shift is None else x + shift, (size,), weight, bias, 1e-5)
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_is_rounded_once(device):
    torch.manual_seed(0)
    x = torch.randn(3, 64, device=device).to(torch.float16)
    shift = torch.randn(64, device=device)
    weight, bias = torch.randn(2, 64, device=device).to(torch.float16)
    outs = [torch.full_like(x, 7.0) for _ in range(2)]
    layer_norm_torch(x, shift, weight, bias, 1e-5, outs[0])
    layer_norm_triton(x, shift, weight, bias, 1e-5, outs[1])
    expected = functional.layer_norm(x.double() + shift, (64,), weight.double(), bias.double(), 1e-5)
    for out in outs:
        torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
