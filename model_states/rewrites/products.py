"""The products of a fused layer, and one weight for several of the model's linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from model_states.kernels.add_norm import RowRoot
from model_states.kernels.linear import linear
from model_states.kernels.linear_parts import product_in_parts


class Unnormed(NamedTuple):
    """Rows, or their parts, that are still to be divided by a root each: a norm's last step, which may come later."""

    rows: torch.Tensor
    root: RowRoot

    def normed(self) -> torch.Tensor:
        """The rows divided."""
        return (self.rows * self.root.inverse()).to(self.rows.dtype)


# [n, m], or the [parts, n, m] that are still to be added up, which `add_norm` does.
Rows = torch.Tensor | Unnormed


@dataclass(frozen=True, slots=True)
class Projection:
    """weight [m, k] and bias [m]; calling it gives x . weight^T + bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product of x [n, k], a new tensor [n, m]."""
        return linear(x, self.weight, self.bias)

    def of(self, x: Rows) -> Rows:
        """The product of x [n, k], which has the root that x has, in parts where that is faster."""
        rows, root = (x, None) if isinstance(x, torch.Tensor) else x
        assert root is None or self.bias is None, "a bias would be divided too"
        found = product_in_parts(rows, self.weight) if self.bias is None else None
        found = self(rows) if found is None else found
        return found if root is None else Unnormed(found, root)

    def added(self, x: Rows, residual: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
        """residual [n, m] plus `multiplier` times the product of x [n, k], a new tensor."""
        rows, root = (x, None) if isinstance(x, torch.Tensor) else x
        return linear(rows, self.weight, self.bias, residual=residual, multiplier=multiplier, root=root)


def linears_of(module: nn.Module) -> list[nn.Linear]:
    """The direct children that are torch's own linear layers; a subclass may do anything."""
    return [child for child in module.children() if isinstance(child, nn.Linear) and type(child) is nn.Linear]


@torch.no_grad()
def merged(linears: Sequence[nn.Linear]) -> Projection:
    """One projection for several of the same input; their parameters become views of its own.

    So no memory is taken twice, names and values of the state dict stay, and a weight that is changed in place is
    changed in both.
    """
    if len(linears) == 1:
        return Projection(linears[0].weight, linears[0].bias)
    weight = _shared([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return Projection(weight, None)
    biases = [
        weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    return Projection(weight, _shared(biases))


def _shared(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole
