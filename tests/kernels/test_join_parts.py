"""`join_parts`: Triton equals the torch twin, and the twin one sum over all parts."""

from __future__ import annotations

import pytest
import torch

from model_states.kernels.join_parts import join_parts_torch, join_parts_triton


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("tokens", "parts", "heads", "head_size"), [(3, 1, 2, 16), (17, 3, 3, 24), (2, 8, 1, 64), (3, 32, 2, 16)]
)
def test_kernel_equals_twin(
    tokens: int, parts: int, heads: int, head_size: int, bias: bool, device: torch.device
) -> None:
    torch.manual_seed(parts)
    sums = torch.randn(tokens, parts, heads, 128, device=device, dtype=torch.float16)
    totals = torch.randn(tokens, parts, 2, heads, device=device).abs()
    totals[0, -1, 0], totals[0, -1, 1], sums[0, -1] = -1e30, 0.0, 0.0  # a part that saw nothing
    totals[1, :, 0], totals[1, :, 1], sums[1] = -1e30, 0.0, 0.0  # none did
    weight = torch.randn(heads, head_size, 128, device=device, dtype=torch.float16)
    biases = torch.randn(heads, head_size, device=device, dtype=torch.float16) if bias else None
    out, expected = (torch.full((tokens, heads, head_size), torch.nan, device=device) for _ in range(2))
    join_parts_torch(expected, sums, totals, weight, biases)
    join_parts_triton(out, sums, totals, weight, biases)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(expected[1], biases.float() if bias else torch.zeros_like(expected[1]))


def test_twin_is_one_sum_over_all_parts() -> None:
    torch.manual_seed(1)
    scores, x, weight = torch.randn(12), torch.randn(12, 128), torch.randn(1, 5, 128)
    cut = [(scores[i : i + 4], x[i : i + 4]) for i in (0, 4, 8)]
    maxima = torch.stack([part.max() for part, _ in cut])
    shares = [(part - most).exp() for (part, _), most in zip(cut, maxima, strict=True)]
    sums = torch.stack([share @ rows for share, (_, rows) in zip(shares, cut, strict=True)])
    totals = torch.stack([maxima / torch.log(torch.tensor(2.0)), torch.stack([s.sum() for s in shares])], 1)
    out = torch.empty(1, 1, 5)
    join_parts_torch(out, sums[None, :, None], totals[None, :, :, None], weight, None)
    torch.testing.assert_close(out[0, 0], weight[0] @ (scores.softmax(0) @ x), rtol=1e-4, atol=1e-4)
