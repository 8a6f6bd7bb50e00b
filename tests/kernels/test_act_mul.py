"""`act_mul`: Triton equals the torch twin for every activation, also in blocks that do not divide a row."""

from __future__ import annotations

import pytest
import torch

from model_states.kernels import act_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", act_mul.ACTIVATIONS)
def test_kernel_equals_twin(act: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(3)
    num_rows, size = 4, 37
    wide = (3 * torch.randn(num_rows, 80, device=device)).to(dtype)
    gate_up = wide[:, : 2 * size]  # rows apart
    results = []
    for op, shape in (
        (act_mul.act_mul_torch, ()),
        (act_mul.act_mul_triton, ()),
        (act_mul.act_mul_triton, ((16, 1),)),
    ):
        out = torch.full((num_rows, size), 7777.0, dtype=dtype, device=device)
        op(gate_up, act, out, *shape)
        results.append(out)
    # torch's 1 + tanh cancels for negative gates, which a sigmoid does not.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(results[1], results[0], **tolerance)
    torch.testing.assert_close(results[2], results[1], rtol=0, atol=0)


def test_gate_comes_first(device: torch.device) -> None:
    gate_up = torch.tensor([[-1.0, 2.0, 3.0, 5.0]], device=device)
    out = torch.empty(1, 2, device=device)
    act_mul.act_mul(gate_up, "relu", out)
    assert out.tolist() == [[0.0, 10.0]]
