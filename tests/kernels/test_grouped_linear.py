"""`grouped_linear`: Triton and the twin equal one product after another, whoever goes where."""

from __future__ import annotations

import pytest
import torch

from model_states.kernels.grouped_linear import grouped_linear_torch, grouped_linear_triton, sorted_by

OPS = [grouped_linear_torch, grouped_linear_triton]
# (tokens, repeats, experts, m, k): few and many rows of an expert, experts without any
SHAPES = [(1, 2, 5, 20, 40), (7, 1, 3, 33, 72), (40, 3, 4, 17, 16), (11, 2, 64, 24, 24)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("op", OPS)
def test_equals_one_product_after_another(op, transposed, shape, device) -> None:
    tokens, repeats, num_experts, m, k = shape
    torch.manual_seed(2)
    wide = torch.full((tokens, k + 9), torch.nan, device=device)
    x = wide[:, 4 : 4 + k]
    x.normal_()
    weight = torch.randn(num_experts, *((k, m) if transposed else (m, k)), device=device)
    weight = weight.mT if transposed else weight
    bias = torch.randn(num_experts, m, device=device) if transposed else None
    experts = torch.randint(0, num_experts, (tokens * repeats,), device=device)
    experts[: tokens // 2] = num_experts - 1
    got = op(x, weight, bias, *sorted_by(experts, num_experts), repeats)
    want = torch.einsum("pk,pmk->pm", x.double().repeat_interleave(repeats, 0), weight[experts].double())
    want = want if bias is None else want + bias[experts]
    assert got.shape == (tokens * repeats, m)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_all_pairs_of_one_expert(op, device) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(150, 32, device=device), torch.randn(3, 16, 32, device=device)
    experts = torch.ones(150, dtype=torch.int64, device=device)
    got = op(x, weight, None, *sorted_by(experts, 3), 1)
    torch.testing.assert_close(got, x @ weight[1].T, rtol=1e-4, atol=1e-4)


def test_order_is_stable_and_ends_are_counts(device) -> None:
    order, ends = sorted_by(torch.tensor([2, 0, 2, 4, 0], device=device), 6)
    assert order.tolist() == [1, 4, 0, 2, 3]
    assert ends.tolist() == [2, 2, 4, 4, 5, 5]
