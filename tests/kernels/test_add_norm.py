"""`add_norm`: Triton equals the torch twin, and the twin the formula, with rows that lie apart."""

from __future__ import annotations

import pytest
import torch

from model_states.kernels import add_norm
from model_states.kernels.add_norm import RMSNorm

POISON = 7777.0


def _norm(size: int, dtype: torch.dtype, device: torch.device, rounds_first: bool) -> RMSNorm:
    weight = torch.randn(size, device=device).to(dtype if rounds_first else torch.float32)
    return RMSNorm(weight, 1e-5, rounds_first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("rounds_first", [True, False])
@pytest.mark.parametrize(("post", "pre"), [(False, True), (True, True), (True, False), (False, False)])
def test_kernel_equals_twin(
    post: bool,
    pre: bool,
    rounds_first: bool,
    has_residual: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(3)
    num_rows, size = 5, 49
    wide = torch.randn(num_rows, 2 * size, device=device).to(dtype)
    x = wide[:, size:]  # rows apart
    residual = torch.randn(num_rows, size, device=device).to(dtype) if has_residual else None
    norms = [_norm(size, dtype, device, rounds_first) if wanted else None for wanted in (post, pre)]
    results = []
    for op, shape in (
        (add_norm.add_norm_torch, ()),
        (add_norm.add_norm_triton, ()),
        (add_norm.add_norm_triton, ((2, 2),)),
    ):
        stream = None if residual is None else residual.clone()
        out = torch.full((num_rows, size), POISON, dtype=dtype, device=device)
        op(x, stream, *norms, 0.5, out, *shape)
        results.append((torch.empty(0) if stream is None else stream, out))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(results[1], results[0], **tolerance)
    torch.testing.assert_close(results[2], results[0], **tolerance)
    assert bool((results[1][1] == POISON).all()) is (not pre)


def test_formula_in_float64(device: torch.device) -> None:
    torch.manual_seed(4)
    x, residual = torch.randn(2, 3, 33, device=device)
    post, pre = (_norm(33, torch.float32, device, True) for _ in range(2))
    out, stream = torch.empty_like(x), residual.clone()
    add_norm.add_norm(x, stream, post, pre, 0.25, out)

    def norm(y: torch.Tensor, spec: RMSNorm) -> torch.Tensor:
        return y / (y.pow(2).mean(-1, keepdim=True) + spec.eps).sqrt() * spec.weight.double()

    total = residual.double() + 0.25 * norm(x.double(), post)
    torch.testing.assert_close(stream.double(), total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double(), norm(total, pre), rtol=1e-6, atol=1e-6)


def test_a_row_may_be_normed_in_place(device: torch.device) -> None:
    torch.manual_seed(5)
    x = torch.randn(3, 20, device=device)
    norm = _norm(20, torch.float32, device, True)
    expected = add_norm.rms_norm_torch(x, norm)
    add_norm.add_norm_triton(x, None, None, norm, 1.0, x)
    torch.testing.assert_close(x, expected)


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 16, device=device)
    add_norm.add_norm_triton(x, x, None, _norm(16, torch.float32, device, True), 1.0, x)


@pytest.mark.parametrize("size", [8, 576, 1024, 3072, 5120, 12288, 32768])
def test_launches_of_any_size_are_valid(size: int) -> None:
    for num_rows in (1, 256, 8192):
        rows, num_warps = add_norm.launch_shape(num_rows, size)
        assert rows.bit_count() == num_warps.bit_count() == 1
        assert 1 <= num_warps <= 16


@pytest.mark.parametrize("op", [add_norm.add_norm_torch, add_norm.add_norm_triton])
def test_rows_with_a_root_of_their_own(op, device: torch.device) -> None:
    """What is still to be divided by the root of a mean, of which the sums over parts are known."""
    torch.manual_seed(5)
    x, residual = torch.randn(4, 24, device=device), torch.randn(4, 24, device=device)
    squares = torch.rand(4, 3, device=device)
    norm, out = _norm(24, torch.float32, device, False), torch.empty(4, 24, device=device)
    divided = x / (squares.sum(1, keepdim=True) / 70 + 0.01).sqrt()
    want_residual = residual + 0.5 * divided
    op(x, residual, None, norm, 0.5, out, root=add_norm.RowRoot(squares, 70, 0.01))
    torch.testing.assert_close(residual, want_residual, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out, add_norm.rms_norm_torch(want_residual, norm), rtol=1e-5, atol=1e-6)
