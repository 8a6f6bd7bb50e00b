"""Gated feed-forward networks: down(act(gate(x)) * up(x)) as two products and one kernel between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import nn

from model_states.kernels.act_mul import ACTIVATIONS
from model_states.kernels.add_norm import RMSNorm
from model_states.kernels.linear import gate_up
from model_states.rewrites.products import Projection, Rows, linears_of, merged
from model_states.rewrites.seen import close, random_like, tried


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """gate_up [2 m, k]: the rows of gate, then those of up; act is a key of `ACTIVATIONS`."""

    gate_up: Projection
    act: str
    down: Projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, k] to [n, k]."""
        return self.down(self.middle(x, None))

    def rows(self, x: torch.Tensor) -> Rows:
        """The same, in parts where that is faster."""
        return self.down.of(self.middle(x, None))

    def middle(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """act(gate) * up of x [n, k], normed first where a norm is given: [n, m]."""
        return gate_up(x, norm, self.gate_up.weight, self.act, self.gate_up.bias)


def recognise_mlp(module: nn.Module) -> GatedMLP | None:
    """The gated network that `module` computes, with its weights merged; None for anything else."""
    linears = linears_of(module)
    others = [c for c in module.children() if c not in linears and not isinstance(c, nn.Dropout)]
    if len(linears) not in (2, 3) or len(others) > 1 or any(True for _ in module.parameters(recurse=False)):
        return None
    # Without a module for it, the activation is a function that the forward calls.
    named = [recognise_activation(other) for other in others] or list(ACTIVATIONS)
    for act, (ins, down) in product([name for name in named if name is not None], _orders(linears)):
        x = random_like(down.weight, 8, ins[0].in_features)
        gate, up = torch.cat([linear(x) for linear in ins], -1).chunk(2, -1)
        expected = tried(module, x)
        if expected is not None and close(down(ACTIVATIONS[act](gate) * up), expected):
            found = GatedMLP(merged(ins), act, Projection(down.weight, down.bias))
            return found if close(found(x), expected) else None
    return None


def recognise_activation(module: nn.Module) -> str | None:
    """The name in `ACTIVATIONS` of what `module` computes."""
    if next(module.parameters(), None) is not None:
        return None
    x = torch.linspace(-6, 6, 997)
    expected = tried(module, x)
    if expected is None:
        return None
    return next((name for name, act in ACTIVATIONS.items() if close(act(x), expected)), None)


def _orders(linears: list[nn.Linear]) -> Iterator[tuple[list[nn.Linear], nn.Linear]]:
    """Ways to take them as ([gate, up] or [both in one], down) that fit by their shapes."""
    for *ins, down in permutations(linears):
        widths = {linear.out_features for linear in ins}
        sizes = {linear.in_features for linear in ins}
        total = sum(linear.out_features for linear in ins)
        if len(ins) in (1, 2) and len(widths) == len(sizes) == 1 and total == 2 * down.in_features:
            yield ins, down
