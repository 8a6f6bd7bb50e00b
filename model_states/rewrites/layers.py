"""Whole decoder layers: two sublayers on a residual stream, and what lies between them in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from model_states.kernels.add_norm import RMSNorm, add_norm
from model_states.kernels.linear import norm_linear
from model_states.kernels.rope_write import Rotary
from model_states.rewrites.mlp import GatedMLP
from model_states.rewrites.norms import recognise_norm
from model_states.rewrites.products import Projection, Rows
from model_states.rewrites.seen import Call, close, floats_of


@dataclass(frozen=True, slots=True)
class Boundary:
    """What lies between two sublayers: the norm after the first, the residual add, the norm before the second."""

    post: RMSNorm | None = None
    multiplier: float = 1.0
    pre: RMSNorm | None = None

    def __call__(self, x: Rows | None, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual, in place, and return what the next sublayer takes; both [num_tokens, hidden].

        x None: nothing is added. Without a norm before the next sublayer it takes the residual itself.
        """
        out = residual if self.pre is None else torch.empty_like(residual)
        if x is None and self.pre is not None:
            add_norm(residual, None, None, self.pre, 1.0, out)
        elif x is not None:
            rows, root = (x, None) if isinstance(x, torch.Tensor) else x
            add_norm(rows, residual, self.post, self.pre, self.multiplier, out, root)
        return out

    @property
    def plain(self) -> bool:
        """Whether this is an add and a norm that products of few rows can take over."""
        return self.post is None and self.pre is not None


@dataclass(frozen=True, slots=True)
class OpaqueMLP:
    """A feed-forward network that stays as it is: experts, for one."""

    module: nn.Module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, hidden]."""
        y = self.module(x[None])
        out: torch.Tensor = y if isinstance(y, torch.Tensor) else y[0]
        return out[0]


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The norms of one layer, where it has them, around attention and feed-forward network, and its multiplier."""

    before_attention: RMSNorm | None
    after_attention: RMSNorm | None
    before_mlp: RMSNorm | None
    after_mlp: RMSNorm | None
    multiplier: float


class Sublayer(Protocol):
    """What a layer asks of its attention, or of what stands in its place: a product, what is between, a product."""

    qkv: Projection
    out: Projection

    def rotary(self, positions: torch.Tensor) -> Rotary | None:
        """What `attend` takes beside the projected tokens."""

    def attend(self, qkv: torch.Tensor, rotary: Rotary | None) -> Rows:
        """From what `qkv` gives to what `out` takes, [num_tokens, ..]; qkv may be overwritten."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """attention and mlp, each after the boundary that leads to it."""

    into_attention: Boundary
    attention: Sublayer
    into_mlp: Boundary
    mlp: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: Rows | None, residual: torch.Tensor, positions: torch.Tensor) -> Rows:
        """What the mlp gives; x is what the one before gave, and not yet in the residual."""
        attention = self.attention
        qkv = attention.qkv(self.into_attention(x, residual))
        x = attention.out.of(attention.attend(qkv, attention.rotary(positions)))
        middle, mlp = self.into_mlp(x, residual), self.mlp
        return mlp.rows(middle) if isinstance(mlp, GatedMLP) else mlp(middle)

    def few_rows(self, residual: torch.Tensor, positions: torch.Tensor, multiplier: float) -> torch.Tensor:
        """The residual stream after this layer, as a new tensor: norms and adds are done by the products.

        multiplier: of what the mlp gives. For a few tokens, whose products read weights and little else; the layer
        must be `plain`.
        """
        attention, mlp = self.attention, self.mlp
        before, between = self.into_attention.pre, self.into_mlp.pre
        assert before is not None, "a plain layer"
        assert isinstance(mlp, GatedMLP), "a plain layer"
        qkv = norm_linear(residual, before, attention.qkv.weight, attention.qkv.bias)
        between_two = attention.attend(qkv, attention.rotary(positions))
        residual = attention.out.added(between_two, residual, self.into_mlp.multiplier)
        return mlp.down.added(mlp.middle(residual, between), residual, multiplier)

    @property
    def plain(self) -> bool:
        """Whether `few_rows` says all that the layer does."""
        return self.into_attention.plain and self.into_mlp.plain and isinstance(self.mlp, GatedMLP)


def recognise_layer(
    layer: Call, children: Sequence[Call], attention: nn.Module
) -> tuple[LayerForm, Call] | None:
    """The form of a layer and the call of its feed-forward network, from the calls of its direct children.

    None for a layer that is not attention, then a feed-forward network, each added to the residual stream.
    """
    calls = [call for call in children if not isinstance(call.module, nn.Dropout)]
    norms = {id(call): recognise_norm(call.module) for call in calls if call.module is not attention}
    blocks = [i for i, call in enumerate(calls) if norms.get(id(call)) is None]
    if len(blocks) != 2 or calls[blocks[0]].module is not attention:
        return None
    first, second = blocks
    before, between, after = calls[:first], calls[first + 1 : second], calls[second + 1 :]
    if len(before) > 1 or len(between) > 2 or len(after) > 1:
        return None
    # One norm between belongs to the attention if it takes what that gave.
    num_post = len(between) - 1 if len(between) != 1 else int(close(between[0].hidden, calls[first].result))
    post, pre = between[: max(0, num_post)], between[max(0, num_post) :]
    groups = (before, post, pre, after)
    before_a, after_a, before_m, after_m = (norms[id(group[0])] if group else None for group in groups)
    for multiplier in (1.0, *floats_of(layer.module)):
        form = LayerForm(before_a, after_a, before_m, after_m, multiplier)
        if _fits(form, layer, calls[first], calls[second]):
            return form, calls[second]
    return None


def _fits(form: LayerForm, layer: Call, attention: Call, mlp: Call) -> bool:
    """Whether each step of the layer follows from the one before as the form says."""
    residual = layer.hidden.clone()
    if not close(Boundary(pre=form.before_attention)(None, residual), attention.hidden):
        return False
    into_mlp = Boundary(form.after_attention, form.multiplier, form.before_mlp)
    if not close(into_mlp(attention.result, residual), mlp.hidden):
        return False
    return close(Boundary(form.after_mlp, form.multiplier)(mlp.result, residual), layer.result)


def into_next(form: LayerForm | None, pre: RMSNorm | None) -> Boundary:
    """The boundary after a layer of this form (None: there is no layer before) that leads to the norm `pre`."""
    return Boundary(pre=pre) if form is None else Boundary(form.after_mlp, form.multiplier, pre)
