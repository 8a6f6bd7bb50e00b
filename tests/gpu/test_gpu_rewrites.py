"""Rewritten layers on a GPU: transformers' hidden states in bf16, and few kernels a layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.one_row import hidden_states, load_state
from support.tiny_models import save_tiny

from model_states.kernels.add_norm import RMSNorm, add_norm_torch, add_norm_triton

pytestmark = pytest.mark.gpu
ON_GPU = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "block_size": 16}


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3", "olmo2", "granite"])
def test_close_to_transformers_modules(name: str, tmp_path: Path) -> None:
    # Small weights: the tiny models' own are made to blow differences up.
    save_tiny(name, tmp_path, initializer_range=0.05)
    plain = load_state(tmp_path, fused_layers=False, **ON_GPU)
    fused = load_state(tmp_path, **ON_GPU)
    assert fused.model.fused is not None
    expected, got = hidden_states(plain).float(), hidden_states(fused).float()
    assert float((got - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("num_tokens", [40, 4])
def test_a_third_of_the_kernels(num_tokens: int, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    counts = []
    for fused_layers in (True, False):
        state = load_state(tmp_path, fused_layers=fused_layers, **ON_GPU)
        hidden_states(state, (num_tokens,))  # compiles
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            hidden_states(state, (num_tokens,))
        counts.append(sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events()))
    assert 0 < 3 * counts[0] < counts[1]


@pytest.mark.parametrize("size", [96, 576, 1536, 2880, 3072, 5120, 12288])
def test_norms_of_any_size(size: int) -> None:
    torch.manual_seed(3)
    x, residual = torch.randn(2, 5, size, device="cuda").bfloat16()
    norm = RMSNorm(torch.randn(size, device="cuda").bfloat16(), 1e-6, True)
    results = []
    for op in (add_norm_torch, add_norm_triton):
        stream, out = residual.clone(), torch.empty_like(x)
        op(x, stream, None, norm, 1.0, out)
        results.append((stream, out))
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)
