"""Experts of a mixture without a wait for the host: what a step does is the same whoever goes where, so it is recorded.

transformers' own ways either ask the host how many tokens each expert has, which no graph can hold, or read a weight
for every token. Its experts modules say in attributes what their weights are; they are replaced one by one, each after
it was held to its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from model_states.kernels.grouped_linear import grouped_linear, sorted_by
from model_states.rewrites.seen import close, random_like

_NUM_TOKENS = 12
_SAID = ("has_gate", "has_bias", "is_transposed", "down_proj")  # by every module of that kind


def rewrite_experts(root: nn.Module) -> int:
    """Replace the forward of every experts module under `root` that is known; returns how many."""
    known = [module for module in root.modules() if all(hasattr(module, name) for name in _SAID)]
    return sum(_rewrite(module) for module in known)


@torch.no_grad()
def _rewrite(module: Any) -> bool:
    forward = experts_forward(module)
    num_experts = module.down_proj.shape[0]
    hidden_size = module.down_proj.shape[2 if module.is_transposed else 1]
    hidden = random_like(module.down_proj, _NUM_TOKENS, hidden_size)
    pairs = torch.arange(2 * _NUM_TOKENS, device=hidden.device).view(_NUM_TOKENS, 2)
    # Each expert has one of a token's two ranks, and some have no token where there are many.
    experts, shares = (
        pairs * (num_experts // 2 + 1) % num_experts,
        random_like(module.down_proj, _NUM_TOKENS, 2),
    )
    try:
        expected = module(hidden, experts, shares)
        if not close(forward(hidden, experts, shares), expected):
            return False
    except (AttributeError, TypeError, RuntimeError):  # of a kind that says the same and means another thing
        return False
    module.forward = forward
    return True


def experts_forward(module: Any) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """A forward with the weights of `module`.

    It takes hidden states [n, hidden], each token's experts int64 [n, k] and their shares [n, k], and gives
    [n, hidden].
    """
    transposed = module.is_transposed
    into, bias = ("gate_up_proj" if module.has_gate else "up_proj"), module.has_bias

    def product(
        x: torch.Tensor, name: str, order: torch.Tensor, ends: torch.Tensor, repeats: int
    ) -> torch.Tensor:
        weight = getattr(module, name)
        own_bias = getattr(module, f"{name}_bias") if bias else None
        return grouped_linear(x, weight.mT if transposed else weight, own_bias, order, ends, repeats)

    def forward(hidden_states: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        num_tokens, top_k = experts.shape
        order, ends = sorted_by(experts.reshape(-1), module.down_proj.shape[0])
        inner = product(hidden_states, into, order, ends, top_k)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out = product(inner, "down_proj", order, ends, 1)
        if getattr(module, "has_post_expert_norm", False):
            out = module.post_expert_norm(out)
        out = out * shares.reshape(-1, 1)
        return out.view(num_tokens, top_k, -1).sum(1).to(hidden_states.dtype)

    return forward
