"""Layers of transformers' encoder-decoder models over flat tokens and pooled encoder outputs.

These models share their layers: attention of a kind or two, then two products with an activation between them, each
sublayer with a residual around it and a layer norm before it or after it. What is here computes the same from the
weights of a loaded module, with fewer passes over memory: queries, keys and values are one product, and a product that
adds to the residual stream leaves its bias to the next norm (see `kernels/layer_norm.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from model_states.attention import AttentionSpec
from model_states.components.cross_attention import CrossAttention, CrossAttentionLayer
from model_states.components.encoder_runs import Encoder
from model_states.components.paged_attention import AttentionLayer, PagedAttention
from model_states.config import ModelConfig
from model_states.kernels.layer_norm import LayerNorm, layer_norm
from model_states.kernels.layer_norm_linear import layer_norm_linear
from model_states.kernels.linear import MAX_ROWS, linear
from model_states.kernels.step_attention import serves_step, step_attention
from model_states.rewrites.mlp import recognise_activation

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Product:
    """A product of one or several linear modules, whose weights become views of its own, so nothing is kept twice.

    weight [out, in]; bias [out], or None where no module has one: one that has none counts as zeros beside others.
    """

    def __init__(self, *modules: nn.Linear) -> None:
        self.weight, self.bias = modules[0].weight, modules[0].bias
        if len(modules) > 1:
            self.weight = nn.Parameter(torch.cat(tuple(m.weight for m in modules)), requires_grad=False)
            if any(m.bias is not None for m in modules):
                biases = (m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in modules)
                self.bias = nn.Parameter(torch.cat(tuple(biases)), requires_grad=False)
            for module, rows in zip(
                modules, self.weight.split([len(m.weight) for m in modules]), strict=True
            ):
                module.weight = nn.Parameter(rows, requires_grad=False)

    def __call__(
        self, x: torch.Tensor, norm: LayerNorm | None = None, activation: str | None = None
    ) -> torch.Tensor:
        """x [n, in], normed if asked for, times the weight, plus the bias; then the activation of that name."""
        if norm is None and activation is None:
            return linear(x, self.weight, self.bias)
        return layer_norm_linear(x, norm, self.weight, self.bias, activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [n, out] plus the product, without the bias; residual may be overwritten."""
        if len(x) > MAX_ROWS:
            return residual.addmm_(x, self.weight.T)
        return linear(x, self.weight, residual=residual)


class ShiftedNorm:
    """A layer norm over rows that lack `shift`, fp32 [size]; None lacks nothing."""

    def __init__(self, module: nn.LayerNorm, shift: torch.Tensor | None) -> None:
        self.norm = LayerNorm(module.weight, module.bias, module.eps, shift)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [n, size], a new tensor."""
        norm, out = self.norm, torch.empty_like(x)
        layer_norm(x, norm.shift, norm.weight, norm.bias, norm.eps, out)
        return out


class Activation:
    """transformers' module of an activation. name: in `ACTIVATIONS`, or None for one that is not there."""

    def __init__(self, module: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.module = module
        self.name = recognise_activation(module) if isinstance(module, nn.Module) else None


class _Residuals:
    """The residual stream of one layer: what goes into each sublayer, and what comes out of it.

    shift: what the stream lacks at the start of the layer; `shift_after` is that at its end.
    """

    def __init__(
        self,
        norms: Sequence[nn.LayerNorm],
        outputs: Sequence[Product],
        norm_first: bool,
        shift: torch.Tensor | None,
    ) -> None:
        self._outputs, self._norm_first, self._norms = outputs, norm_first, []
        for norm, output in zip(norms, outputs, strict=True):
            bias = None if output.bias is None else output.bias.float()
            if norm_first:
                self._norms.append(ShiftedNorm(norm, shift))
                shift = bias if shift is None else shift if bias is None else shift + bias
            else:
                self._norms.append(ShiftedNorm(norm, bias))
        self.shift_after = shift

    def enter(
        self, index: int, x: torch.Tensor, product: Product, activation: Activation | None = None
    ) -> torch.Tensor:
        """The first product of sublayer `index`, and an activation behind it, of what that is given of the stream x."""
        norm = self._norms[index].norm if self._norm_first else None
        if activation is None or activation.name is not None:
            return product(x, norm, None if activation is None else activation.name)
        return activation.module(product(x, norm))

    def leave(self, index: int, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """The stream after the sublayer, from what its last product is given."""
        x = self._outputs[index].add_to(x, result)
        return x if self._norm_first else self._norms[index](x)


class CrossProjection:
    """A `Projection` that is one product: keys and values of an encoder's output."""

    def __init__(self, key_value: Product, spec: AttentionSpec) -> None:
        self._product, self._shape = key_value, (2, spec.num_kv_heads, spec.head_size)
        self.key_weight: torch.Tensor
        self.value_weight: torch.Tensor
        self.key_weight, self.value_weight = key_value.weight.view(*self._shape, -1)
        bias = key_value.bias
        self.value_bias: torch.Tensor | None = None if bias is None else bias.view(self._shape)[1]

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [n, positions, num_heads, head_size] of [n, positions, hidden_size]."""
        both = functional.linear(hidden_states, self._product.weight, self._product.bias)
        key, value = both.view(*both.shape[:2], *self._shape).unbind(2)
        return key, value


class CrossDecoderLayer:
    """A decoder layer: `project` takes what an encoder gave, a call the stream after the layer before.

    module: the layer of transformers. norm_first: norms come before the sublayers. shift: `shift_after` of the layer
    before; the last one's is what the norm behind all layers must add.
    """

    def __init__(self, module: Any, *, norm_first: bool, shift: torch.Tensor | None = None) -> None:
        inner, outer = module.self_attn, module.encoder_attn
        self.spec = attention_spec(inner)
        self._qkv = Product(inner.q_proj, inner.k_proj, inner.v_proj)
        self._query = Product(outer.q_proj)
        self.project = CrossProjection(Product(outer.k_proj, outer.v_proj), self.spec)
        self._up, self._activation = Product(module.fc1), Activation(module.activation_fn)
        outputs = [Product(inner.out_proj), Product(outer.out_proj), Product(module.fc2)]
        norms = [module.self_attn_layer_norm, module.encoder_attn_layer_norm, module.final_layer_norm]
        self._stream = _Residuals(norms, outputs, norm_first, shift)
        self.shift_after = self._stream.shift_after
        self._self_attention: AttentionLayer
        self._cross_attention: CrossAttentionLayer
        self._fuses_steps = False

    def bind(
        self, self_attention: AttentionLayer, cross_attention: CrossAttentionLayer, *, fuses_steps: bool
    ) -> None:
        """Set where the layer keeps its state. fuses_steps: short rows may be written and read by one Triton kernel."""
        self._self_attention, self._cross_attention = self_attention, cross_attention
        self._fuses_steps = fuses_steps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The stream [num_tokens, hidden_size] after this layer."""
        return self.run(x, self._attend_to_self, self._cross_attention)

    def run(
        self, x: torch.Tensor, attend: Attend, attend_across: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """As a call, with attention of the caller's own, which sees what it likes of the tokens and of encoder outputs.

        attend: query, key and value to what they see. attend_across: query to what it sees. All of these are
        [num_tokens, num_heads, head_size].
        """
        stream, size = self._stream, self.spec.head_size
        q, k, v = stream.enter(0, x, self._qkv).view(len(x), 3, -1, size).unbind(1)
        x = stream.leave(0, x, attend(q, k, v).flatten(1))
        q = stream.enter(1, x, self._query).view(len(x), -1, size)
        x = stream.leave(1, x, attend_across(q).flatten(1))
        return stream.leave(2, x, stream.enter(2, x, self._up, self._activation))

    def _attend_to_self(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        layer = self._self_attention
        if not (self._fuses_steps and serves_step(query, layer.metadata, layer.spec)):
            return layer(query, key, value)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        caches = layer.key_cache, layer.value_cache
        step_attention(out, query, key, value, *caches, layer.metadata, layer.spec)
        return out


class EncoderLayer:
    """An encoder layer, in which every position sees all positions; arguments as for `CrossDecoderLayer`."""

    def __init__(self, module: Any, *, norm_first: bool, shift: torch.Tensor | None = None) -> None:
        attention = module.self_attn
        self._spec = attention_spec(attention)
        self._qkv = Product(attention.q_proj, attention.k_proj, attention.v_proj)
        self._up, self._activation = Product(module.fc1), Activation(module.activation_fn)
        norms, outputs = (
            [module.self_attn_layer_norm, module.final_layer_norm],
            [attention.out_proj, module.fc2],
        )
        self._stream = _Residuals(norms, [Product(output) for output in outputs], norm_first, shift)
        self.shift_after = self._stream.shift_after

    def __call__(self, x: torch.Tensor, num_inputs: int) -> torch.Tensor:
        """The stream [num_inputs * positions, hidden_size] after this layer."""
        stream, spec = self._stream, self._spec
        qkv = stream.enter(0, x, self._qkv).view(num_inputs, -1, 3, spec.num_heads, spec.head_size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, scale=spec.scale)
        x = stream.leave(0, x, seen.transpose(1, 2).reshape(len(x), -1))
        return stream.leave(1, x, stream.enter(1, x, self._up, self._activation))


class CrossDecoder:
    """Decoder layers with their state.

    layers: in order. components: self-attention and cross-attention, for the model state. shift: what the stream lacks
    behind the last layer.
    """

    def __init__(
        self, config: ModelConfig, modules: Sequence[Any], encoder: Encoder, *, norm_first: bool
    ) -> None:
        """modules: transformers' layers."""
        self.layers: list[CrossDecoderLayer] = stack_layers(CrossDecoderLayer, modules, norm_first)
        specs = [layer.spec for layer in self.layers]
        projections = [layer.project for layer in self.layers]
        self.self_attention = PagedAttention(config, specs)
        self.cross_attention = CrossAttention(config, specs[0], encoder, projections)
        self.components = [self.self_attention, self.cross_attention]
        state = (self.self_attention.layers, self.cross_attention.layers)
        fuses_steps = self.self_attention.backend.name == "triton"
        for layer, pages, pool in zip(self.layers, *state, strict=True):
            layer.bind(pages, pool, fuses_steps=fuses_steps)
        self.shift = self.layers[-1].shift_after

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The stream [num_tokens, hidden_size] behind all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def stack_layers(kind: Callable[..., Any], modules: Sequence[Any], norm_first: bool) -> list[Any]:
    """Layers of one kind, each told what the stream lacks when it comes to it."""
    layers: list[Any] = []
    for module in modules:
        shift = layers[-1].shift_after if layers else None
        layers.append(kind(module, norm_first=norm_first, shift=shift))
    return layers


def pad_rows(weight: torch.Tensor, multiple: int = 64) -> torch.Tensor:
    """The weight with rows of zeros behind it: products whose results lie at odd addresses are slow."""
    return functional.pad(weight, (0, 0, 0, -len(weight) % multiple))


def attention_spec(module: Any) -> AttentionSpec:
    """Heads of transformers' attention module, which shares no keys among them."""
    size = module.head_dim
    return AttentionSpec(module.num_heads, module.num_heads, size, size, scale=float(size**-0.5))
