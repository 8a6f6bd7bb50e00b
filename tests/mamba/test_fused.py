"""Which models run as a whole loop, and that such a loop and transformers' own layers give the same."""

from __future__ import annotations

import pytest
import torch
from support.drained import Drained
from support.recurrent_exact import check_fused_and_plain, make_llm

from model_states.kernels.add_norm import RMSNorm, add_norm_torch, add_norm_triton

WHOLE = ("mamba", "falcon_mamba", "mamba2", "bamba", "jamba", "granitemoehybrid_dense")


@pytest.mark.parametrize("name", [*WHOLE, "nemotron_h"])
def test_fused_and_plain_layers_give_the_same(name: str, tiny, drained: Drained) -> None:
    check_fused_and_plain(tiny(name), name in WHOLE, drained)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_logits_that_a_model_widens_stay_as_the_product_rounds_them(
    name: str, tiny, drained: Drained
) -> None:
    model = make_llm(drained, tiny(name), 64, dtype="bfloat16").engine.runner.model_state.model
    hidden_states = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    fused, model.fused_head = model.fused_head, None
    assert fused is not None
    logits, wide = fused(hidden_states.bfloat16()), model.compute_logits(hidden_states.bfloat16())
    assert logits.dtype == torch.bfloat16
    assert wide.dtype == torch.float32
    torch.testing.assert_close(logits.float(), wide, rtol=2e-2, atol=1e-2)


def test_a_residual_may_be_wider_than_what_is_added(device: torch.device) -> None:
    torch.manual_seed(1)
    norm = RMSNorm(torch.randn(40, device=device).bfloat16(), 1e-5, False)
    x, wide = torch.randn(3, 40, device=device).bfloat16(), torch.randn(3, 40, device=device)
    results = []
    for op in (add_norm_torch, add_norm_triton):
        residual, out = wide.clone(), torch.empty_like(x)
        op(x, residual, None, norm, 1.0, out)
        torch.testing.assert_close(residual, wide + x.float(), rtol=0, atol=0)
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=1e-2)
