"""Experts rewritten: every kind of transformers' experts gives what it gave, and what is no such thing stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from model_states.rewrites.experts import rewrite_experts

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
MOE = {"num_experts": 5, "moe_intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": MOE,
    # Biases, transposed weights, rows of gate and up that take turns.
    "gpt_oss": {"num_local_experts": 5},
    "granitemoe": {"num_local_experts": 5},
    "lfm2_moe": {**MOE, "layer_types": ["full_attention"] * 2, "num_dense_layers": 1},
    "qwen3_next": {**MOE, "layer_types": ["full_attention"] * 2, "shared_expert_intermediate_size": 24},
    # Without a gate.
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    },
}


def build(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape)
    return model


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_kind_gives_what_it_gave(kind: str) -> None:
    model = build(kind)
    ids = torch.arange(17)[None] * 7 % 61
    before = model(ids, use_cache=False).logits
    assert rewrite_experts(model) == (1 if kind in ("lfm2_moe", "nemotron_h") else 2)
    torch.testing.assert_close(model(ids, use_cache=False).logits, before, rtol=1e-4, atol=1e-4)


def test_weights_that_change_later_count() -> None:
    """The forward looks its weights up: whoever fills them after the rewrite is seen."""
    model = build("mixtral")
    rewrite_experts(model)
    experts = next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")
    experts.down_proj.data.zero_()
    out = experts(torch.randn(3, 32), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    assert not out.any()


def test_other_numbers_are_left_alone() -> None:
    """A module that says what experts say, and computes something else."""

    class Odd(nn.Module):
        has_gate, has_bias, is_transposed = True, False, False

        def __init__(self) -> None:
            super().__init__()
            self.act_fn = nn.SiLU()
            self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 8))
            self.down_proj = nn.Parameter(torch.randn(4, 8, 8))

        def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, -1)
            return self.act_fn(gate) * up

        def forward(self, hidden: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            return hidden * shares.sum(1, keepdim=True)

    odd = Odd()
    assert rewrite_experts(odd) == 0
    assert "forward" not in vars(odd)
