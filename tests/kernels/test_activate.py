"""`activate`: Triton equals the torch twin, and the twin torch's own activation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from model_states.kernels.act_mul import ACTIVATIONS
from model_states.kernels.activate import activate, activate_torch, activate_triton


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_and_twin(act, dtype, device) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-12, 12, 2049), 3 * torch.randn(77), torch.tensor([0.0, 1e4, -1e4])])
    x = x.to(device, dtype)
    outs = [op(x.clone(), act) for op in (activate_torch, activate_triton)]
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-3, "atol": 1e-4}
    for out in outs:
        torch.testing.assert_close(out.double(), ACTIVATIONS[act](x.double()), **tolerance)


def test_small_results_of_gelu_keep_their_digits(device) -> None:
    """1 + erf of what is near -1 has none left in fp32."""
    x = torch.linspace(-4.5, -2, 500, device=device)
    torch.testing.assert_close(
        activate_triton(x.clone(), "gelu").double(), functional.gelu(x.double()), rtol=4e-3, atol=0
    )


def test_what_is_no_number_stays_so_and_infinity_too(device) -> None:
    x = torch.tensor([torch.nan, torch.inf, 1.0], device=device)
    out = activate_triton(x.clone(), "gelu")
    assert out[0].isnan()
    assert out[1] == torch.inf
    assert activate_torch(x.clone(), "gelu")[0].isnan()  # of infinity torch's gives NaN on some processors


def test_it_is_in_place_and_takes_nothing(device) -> None:
    x = torch.ones(2, 3, device=device)
    assert activate(x, "relu") is x
    assert activate(x[:0], "relu").shape == (0, 3)
