"""Decoder layers of transformers' encoder-decoder models on flat tokens, with the weights of the loaded module.

These models share one layer: self-attention, attention over the encoder's output, two products with an activation
between them, each with a layer norm before it or after it and a residual around it. The layers here do the same with
paged self-attention and pooled cross-attention; queries, keys and values are one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from model_states.attention import AttentionSpec
from model_states.components.cross_attention import CrossAttentionLayer
from model_states.components.paged_attention import AttentionLayer
from model_states.kernels.linear import linear


class Product(NamedTuple):
    """One product's weight [out, in] and bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, in] times the weight, plus bias and residual."""
        return linear(x, self.weight, self.bias, residual=residual)


class CrossDecoderLayer:
    """One layer: `project` takes what an encoder gave, a call the hidden states of the layer before."""

    def __init__(self, module: Any, *, norm_first: bool) -> None:
        """module: the layer of transformers, whose weights are shared. norm_first: norms come before the sublayers."""
        self._norm_first = norm_first
        inner, outer = module.self_attn, module.encoder_attn
        self.spec = _spec(inner)
        self._qkv = fuse_products([inner.q_proj, inner.k_proj, inner.v_proj])
        self._self_out = fuse_products([inner.out_proj])
        self._query = fuse_products([outer.q_proj])
        self._key_value = fuse_products([outer.k_proj, outer.v_proj])
        self._cross_out = fuse_products([outer.out_proj])
        self._up, self._down = fuse_products([module.fc1]), fuse_products([module.fc2])
        self._activation = module.activation_fn
        self._norms = (module.self_attn_layer_norm, module.encoder_attn_layer_norm, module.final_layer_norm)
        self._self_attention: AttentionLayer
        self._cross_attention: CrossAttentionLayer

    def bind(self, self_attention: AttentionLayer, cross_attention: CrossAttentionLayer) -> None:
        """Set where the layer keeps its state."""
        self._self_attention, self._cross_attention = self_attention, cross_attention

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [n, positions, num_heads, head_size] of an encoder's output [n, positions, hidden_size]."""
        both = functional.linear(hidden_states, *self._key_value)
        key, value = both.view(*both.shape[:2], 2, -1, self.spec.head_size).unbind(2)
        return key, value

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] after this layer."""
        q, k, v = self._heads(self._qkv(self._before(0, x)), 3)
        x = self._after(0, self._self_out(self._self_attention(q, k, v).flatten(1), x))
        (q,) = self._heads(self._query(self._before(1, x)), 1)
        x = self._after(1, self._cross_out(self._cross_attention(q).flatten(1), x))
        hidden: torch.Tensor = self._activation(self._up(self._before(2, x)))
        return self._after(2, self._down(hidden, x))

    def _before(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return _layer_norm(x, self._norms[index]) if self._norm_first else x

    def _after(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return x if self._norm_first else _layer_norm(x, self._norms[index])

    def _heads(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """`count` tensors [num_tokens, num_heads, head_size] of x [num_tokens, count * hidden_size]."""
        return x.view(len(x), count, -1, self.spec.head_size).unbind(1)


def fuse_products(modules: Sequence[nn.Linear]) -> Product:
    """One product for several of one input; the modules' weights become views of it, so nothing is kept twice.

    A module without a bias gets zeros where another has one.
    """
    if len(modules) == 1:
        return Product(modules[0].weight, modules[0].bias)
    weight = torch.cat([module.weight for module in modules])
    rows = weight.split([len(module.weight) for module in modules])
    bias = None
    if any(module.bias is not None for module in modules):
        bias = torch.cat([_bias(module) for module in modules])
    for module, part in zip(modules, rows, strict=True):
        module.weight = nn.Parameter(part, requires_grad=False)
    return Product(weight, bias)


def _bias(module: nn.Linear) -> torch.Tensor:
    return module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias


def _layer_norm(x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    return functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _spec(attention: Any) -> AttentionSpec:
    size = attention.head_dim
    return AttentionSpec(attention.num_heads, attention.num_heads, size, size, scale=float(size**-0.5))
