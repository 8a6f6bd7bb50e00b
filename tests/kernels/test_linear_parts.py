"""`linear_parts`: parts add up to the product, gate and up are those of two kernels, and steps of both are right."""

from __future__ import annotations

import pytest
import torch

from model_states.kernels import add_norm, linear_parts
from model_states.kernels.act_mul import ACTIVATIONS
from model_states.rewrites.layers import Boundary
from model_states.rewrites.mlp import GatedMLP
from model_states.rewrites.products import Projection


def _half(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bf16 products


def _inputs(
    n: int, m: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(n + m)
    wide = torch.randn(n, k + 8, device=device).to(dtype)
    return wide[:, 8:], (torch.randn(m, k, device=device) / k**0.5).to(dtype)


@pytest.mark.parametrize(("n", "m", "k", "parts"), [(17, 64, 256, 1), (65, 128, 1024, 8), (70, 64, 256, 2)])
def test_parts_add_up(n: int, m: int, k: int, parts: int, device: torch.device) -> None:
    x, weight = _inputs(n, m, k, _half(device), device)
    got = linear_parts.product_in_parts_triton(x, weight, parts)
    assert got.shape == (parts, n, m)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got, linear_parts.product_in_parts_torch(x, weight, parts), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(got.double().sum(0), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("act", list(ACTIVATIONS))
@pytest.mark.parametrize("n", [17, 70])
def test_gate_and_up(n: int, act: str, device: torch.device) -> None:
    x, weight = _inputs(n, 256, 256, _half(device), device)
    got = linear_parts.gate_up_product_triton(x, weight, act)
    want = linear_parts.gate_up_product_torch(x, weight, act)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("n", [17, 64, 200, 256])
@pytest.mark.parametrize(("m", "k"), [(768, 1536), (768, 2048), (768, 768), (1024, 1024), (64, 256)])
def test_parts_are_whole_steps_and_keep_a_gpu_busy(n: int, m: int, k: int) -> None:
    parts = linear_parts.num_parts(n, m, k)
    assert parts > 1
    assert k % (128 * parts) == 0
    programs = m // 64 * -(-n // 64)
    assert parts * programs <= 132
    assert k % (256 * parts) or 2 * parts * programs > 132


@pytest.mark.parametrize(
    ("n", "m", "k"),
    [
        (16, 768, 1536),
        (257, 768, 1536),
        (64, 768, 1530),
        (64, 700, 1536),
        (256, 1536, 1024),
        (64, 64, 128),
        (64, 8192, 8192),
    ],
)
def test_other_products_are_left_to_the_library(n: int, m: int, k: int) -> None:
    assert linear_parts.num_parts(n, m, k) == 0


@pytest.mark.parametrize("has_post", [True, False])
@pytest.mark.parametrize("has_root", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_norm_adds_parts_up(parts: int, has_root: bool, has_post: bool, device: torch.device) -> None:
    torch.manual_seed(5)
    n, size, dtype = 5, 49, torch.bfloat16
    x = torch.randn(parts, n, size, device=device)
    whole = x.sum(0).to(dtype)
    root = add_norm.RowRoot(torch.rand(n, 3, device=device) + 1, 7, 1e-5) if has_root else None
    norms = [add_norm.RMSNorm(torch.rand(size, device=device).to(dtype), 1e-5, True) for _ in range(2)]
    residual = torch.randn(n, size, device=device).to(dtype)
    for op in (add_norm.add_norm_torch, add_norm.add_norm_triton):
        found = []
        for given in (x, whole):
            stream, out = residual.clone(), torch.empty_like(residual)
            op(given, stream, norms[0] if has_post else None, norms[1], 0.5, out, root=root)
            found.append((stream, out))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("n", [16, 40, 300])
def test_a_gated_network_in_parts(n: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer makes of the parts is what it makes of the network's result, for any number of rows."""
    monkeypatch.setattr(linear_parts, "use_triton", lambda tensor: True)
    monkeypatch.setattr(linear_parts, "_PROGRAMS", 8)
    linear_parts.num_parts.cache_clear()
    linear_parts.takes_gate_up.cache_clear()
    half, (hidden, inner) = _half(device), (64, 256)
    x, both = _inputs(n, 2 * inner, hidden, half, device)
    _, down = _inputs(n, hidden, inner, half, device)
    mlp = GatedMLP(Projection(both, None), "silu", Projection(down, None))
    parts, whole = mlp.rows(x), mlp(x)
    assert isinstance(parts, torch.Tensor)
    assert parts.shape == ((2, n, hidden) if n == 40 else (n, hidden))
    boundary = Boundary(
        pre=add_norm.RMSNorm(torch.rand(hidden, device=device).to(half), 1e-5, True), multiplier=0.5
    )
    residual = torch.randn(n, hidden, device=device).to(half)
    got, want = (boundary(result, residual.clone()) for result in (parts, whole))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    linear_parts.num_parts.cache_clear()
    linear_parts.takes_gate_up.cache_clear()
