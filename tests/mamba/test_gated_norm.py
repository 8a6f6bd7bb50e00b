"""`gated_norm`: Triton equals the twin, and the twin says what transformers' modules compute."""

from __future__ import annotations

import pytest
import torch
from model_states_mamba.kernels.gated_norm import GatedNorm, gated_norm_torch, gated_norm_triton


@pytest.mark.parametrize("gate_last", [False, True])
@pytest.mark.parametrize("group_size", [39, 13])
def test_kernel_equals_twin(group_size: int, gate_last: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    y, gate = torch.randn(5, 39, device=device), torch.randn(5, 90, device=device)[:, :39]
    norm = GatedNorm(torch.randn(39, device=device), 1e-5, group_size, gate_last)
    results = [torch.full_like(y, 7777.0) for _ in range(2)]
    gated_norm_torch(y, gate, norm, results[0])
    gated_norm_triton(y, gate, norm, results[1])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_twin_is_transformers_norm() -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    torch.manual_seed(2)
    y, gate = torch.randn(1, 5, 24), torch.randn(1, 5, 24)
    for gate_last in (False, True):
        module = FalconH1RMSNormGated(24, eps=1e-3, n_groups=2, norm_before_gate=gate_last)
        module.weight.data = torch.randn(24)
        out = torch.empty(5, 24)
        gated_norm_torch(y[0], gate[0], GatedNorm(module.weight.data, 1e-3, 12, gate_last), out)
        torch.testing.assert_close(out, module(y, gate)[0])
