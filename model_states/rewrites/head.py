"""The head of a model: the logits as one product of the hidden states, and a number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from model_states.kernels.linear import linear
from model_states.rewrites.seen import close, floats_of, random_like
from model_states.transformers_bridge import TransformersModel


@dataclass(frozen=True, slots=True)
class Head:
    """weight [vocab_size, hidden], bias [vocab_size]; calling it gives multiplier (h . weight^T + bias)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    multiplier: float

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden]."""
        return linear(hidden_states, self.weight, self.bias, multiplier=self.multiplier)


@torch.no_grad()
def recognise_head(model: TransformersModel) -> Head | None:
    """The output embedding, where logits are its product times a number that the config has; None for another."""
    module = model.model.get_output_embeddings()
    if type(module) is not nn.Linear:
        return None
    x = random_like(module.weight, 2, module.in_features)
    expected = model.compute_logits(x)
    plain = linear(x, module.weight, module.bias)
    rounded = expected.to(plain.dtype)
    if torch.equal(rounded.to(expected.dtype), expected):
        # Some models widen what they have rounded. That changes no logit, and is left out.
        expected = rounded
    numbers = [value for value in floats_of(model.config) if value]
    multipliers = (1.0, *numbers, *(1.0 / value for value in numbers))
    multiplier = next((m for m in multipliers if close(plain * m, expected)), None)
    return None if multiplier is None else Head(module.weight, module.bias, multiplier)
