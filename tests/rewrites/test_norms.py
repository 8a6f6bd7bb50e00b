"""Which modules are RMS norms, with which weight, epsilon and rounding; found by their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from model_states.kernels.add_norm import rms_norm_torch
from model_states.rewrites.norms import norm_rows, recognise_norm

SIZE = 256


class _Gated(nn.Module):
    """A norm that takes a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate


class _Unrooted(_Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize(
    ("kind", "rounds_first"),
    [(LlamaRMSNorm, True), (Gemma3RMSNorm, False), (Olmo2RMSNorm, False), (nn.RMSNorm, None)],
)
def test_norms_are_recognised(
    kind: type[nn.Module], rounds_first: bool | None, eps: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    module = kind(SIZE, eps=eps).to(dtype).requires_grad_(False)
    module.weight.data += torch.randn(SIZE).to(dtype)
    norm = recognise_norm(module)
    assert norm is not None
    assert norm.eps == eps
    if dtype == torch.bfloat16 and rounds_first is not None:
        assert norm.rounds_first is rounds_first
    x = 1e-2 * torch.randn(7, SIZE).to(dtype)
    torch.testing.assert_close(norm_rows(x, norm), module(x), rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(norm_rows(x, norm), rms_norm_torch(x, norm), rtol=0, atol=0)


@pytest.mark.parametrize(
    "module",
    [
        Cohere2LayerNorm(SIZE),
        nn.LayerNorm(SIZE),
        nn.LayerNorm(SIZE, bias=False),
        nn.PReLU(SIZE),
        nn.Embedding(4, SIZE),
        nn.Sequential(LlamaRMSNorm(SIZE)),
        _Gated(),
        _Unrooted(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_are_not(module: nn.Module) -> None:
    assert recognise_norm(module) is None
