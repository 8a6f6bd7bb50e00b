"""`gated_norm`: Triton equals the twin, and the twin is transformers' module."""

from __future__ import annotations

import pytest
import torch
from model_states_linear.kernels.gated_norm import gated_norm_torch, gated_norm_triton


@pytest.mark.parametrize(("num_heads", "size"), [(3, 13), (5, 700)])
def test_kernel_equals_twin(num_heads: int, size: int, device: torch.device) -> None:
    torch.manual_seed(1)
    y = torch.randn(4, num_heads, size, device=device)
    gate = torch.randn(4, num_heads * size + 9, device=device)[:, 5:-4]
    weight = torch.randn(size, device=device)
    results = [torch.full_like(y, 7777.0), y.clone()]
    gated_norm_torch(y, gate, weight, 1e-5, results[0])
    gated_norm_triton(results[1], gate, weight, 1e-5, results[1])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_twin_is_transformers_norm() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    torch.manual_seed(2)
    y, gate = torch.randn(5, 3, 8), torch.randn(5, 24)
    module = Qwen3NextRMSNormGated(8, eps=1e-3)
    module.weight.data = torch.randn(8)
    out = torch.empty_like(y)
    gated_norm_torch(y, gate, module.weight.data, 1e-3, out)
    torch.testing.assert_close(out, module(y, gate.view(y.shape)))
