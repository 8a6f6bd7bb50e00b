"""Attention with one projection in, one kernel between, and keys and values written straight to the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Literal, Protocol

import torch
from torch import nn

from model_states.attention import AttentionSpec
from model_states.kernels.add_norm import RMSNorm, add_norm, rms_norm_torch
from model_states.kernels.rope_write import HeadLayout, Rotary, rope_write, rotate_torch
from model_states.rewrites.norms import recognise_norm
from model_states.rewrites.products import Projection, linears_of, merged
from model_states.rewrites.seen import Call, StandIn, close

Tables = tuple[torch.Tensor, torch.Tensor]


class PagedLayer(Protocol):
    """What a fused attention needs of `AttentionLayer`."""

    spec: AttentionSpec
    key_cache: torch.Tensor
    value_cache: torch.Tensor

    @property
    def slot_mapping(self) -> torch.Tensor:
        """int64 [num_tokens]."""

    def attend(self, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens, num_heads, head_size] to [num_tokens, num_heads, head_size_v]."""


@dataclass(frozen=True, slots=True)
class RotaryStyle:
    """How a model's own cos and sin, [.., width], give the tables of `Rotary`, [.., rotary_dim / 2].

    Each angle stands there "once", or twice: in "halves", or in "pairs" beside itself.
    """

    angles: Literal["halves", "once", "pairs"]
    interleaved: bool

    def tables(self, cos: torch.Tensor, sin: torch.Tensor) -> Tables:
        """The tables of cos and sin [num_rows, width]."""
        if self.angles == "once":
            return cos, sin
        if self.angles == "pairs":
            return cos[:, ::2].contiguous(), sin[:, ::2].contiguous()
        half = cos.shape[1] // 2
        return cos[:, :half], sin[:, :half]

    def rotary(self, tables: Tables, positions: torch.Tensor | None) -> Rotary:
        """What the kernel takes."""
        return Rotary(*tables, positions, self.interleaved)


_STYLES = [
    RotaryStyle("halves", False),
    RotaryStyle("once", False),
    RotaryStyle("pairs", True),
    RotaryStyle("halves", True),
    RotaryStyle("once", True),
]


@dataclass(frozen=True, slots=True)
class HeadForm:
    """What happens to queries or keys before attention: a norm of each head or of all together, and a rotation."""

    norm: RMSNorm | None = None
    wide: bool = False  # the norm is over all heads at once
    style: RotaryStyle | None = None


@dataclass(slots=True)
class FusedAttention:
    """The attention of one decoder layer; `layer` is looked up at each call, so that it may change.

    gated: `qkv` gives a gate behind the values, and its sigmoid is multiplied with what attention gives.
    """

    qkv: Projection
    out: Projection
    heads: HeadLayout
    query: HeadForm
    key: HeadForm
    layer: PagedLayer
    sinks: torch.Tensor | None
    gated: bool = False
    tables: Tables | None = field(default=None, repr=False)  # by position

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden] at positions int64 [num_tokens], rotated by the layer's own `tables`."""
        return self.out(self.attend(self.qkv(x), self.rotary(positions)))

    def rotary(self, positions: torch.Tensor) -> Rotary | None:
        """The rotation of tokens at `positions`, by the layer's own `tables`."""
        if self.query.style is None or self.tables is None:
            return None
        return self.query.style.rotary(self.tables, positions)

    def attend(self, qkv: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Attention of the projected tokens, [num_tokens, num_heads * head_size_v]; qkv is overwritten."""
        heads, layer = self.heads, self.layer
        qkv, gate = qkv.tensor_split([sum(heads.sizes)], 1)
        if self.query.wide or self.key.wide:
            self._norm_wide(qkv)
        rope_write(
            qkv,
            heads,
            None if self.query.wide else self.query.norm,
            None if self.key.wide else self.key.norm,
            rotary,
            layer.key_cache,
            layer.value_cache,
            layer.slot_mapping,
        )
        query = qkv[:, : heads.num_heads * heads.head_size].view(-1, heads.num_heads, heads.head_size)
        out = layer.attend(query, self.sinks).flatten(1)
        return out * gate.sigmoid() if self.gated else out

    def _norm_wide(self, qkv: torch.Tensor) -> None:
        q, k, _ = qkv.split(self.heads.sizes, -1)
        for part, form in ((q, self.query), (k, self.key)):
            if form.wide:
                add_norm(part, None, None, form.norm, 1.0, part)


def recognise_attention(call: Call, seen: StandIn) -> FusedAttention | None:
    """The attention that the module of `call` computes, given what it handed to `seen`, which is its `layer` so far.

    None where anything else happens to queries, keys, values or the output than `FusedAttention` knows.
    """
    spec, module = seen.spec, call.module
    heads = HeadLayout(spec.num_heads, spec.num_kv_heads, spec.head_size, spec.head_size_v)
    constant_sinks = seen.sinks is None or any(seen.sinks is p for p in module.parameters())
    if not constant_sinks or spec.value_from_key or heads.head_size % 2:
        return None
    norms = [norm for child in module.children() if (norm := recognise_norm(child)) is not None]
    tables = position_tables(call.kwargs)
    for linears, gate in _with_gates(linears_of(module), heads):
        given = seen.out.flatten(1)
        if gate is not None:
            given = given * gate(call.hidden).sigmoid()
        outs = [
            out for out in linears if out.in_features == given.shape[1] and close(out(given), call.result)
        ]
        for ins in _inputs(linears, call.hidden.shape[1], heads) if len(outs) == 1 else ():
            q, k, v = torch.cat([linear(call.hidden) for linear in ins], -1).split(heads.sizes, -1)
            if not close(v.reshape(seen.value.shape), seen.value):
                continue
            query = _form(q, seen.query, norms, tables)
            key = _form(k, seen.key, [n for n in norms if query is None or n is not query.norm], tables)
            if query is None or key is None or query.style != key.style:
                continue
            whole = merged(ins if gate is None else [*ins, gate])
            out = Projection(outs[0].weight, outs[0].bias)
            fused = FusedAttention(whole, out, heads, query, key, seen, seen.sinks, gate is not None)
            return fused if _reproduces(fused, call, seen) else None
    return None


def _with_gates(
    linears: Sequence[nn.Linear], heads: HeadLayout
) -> Iterator[tuple[Sequence[nn.Linear], nn.Linear | None]]:
    """The layers as they are, without a gate; and with one that gives queries and gates head by head cut in two."""
    yield linears, None
    width = heads.num_heads * heads.head_size
    for linear in linears if heads.head_size == heads.head_size_v else ():
        if linear.out_features == 2 * width and linear.bias is None:
            halves = linear.weight.detach().unflatten(0, (heads.num_heads, 2, heads.head_size)).unbind(1)
            query, gate = (_linear(half.flatten(0, 1)) for half in halves)
            yield [query if other is linear else other for other in linears], gate


def _linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def position_tables(kwargs: dict[str, Any]) -> Tables | None:
    """cos and sin [num_tokens, width] among the keywords of a layer or its attention."""
    pair = kwargs.get("position_embeddings")
    if not isinstance(pair, tuple) or len(pair) != 2:
        return None
    if not all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in pair):
        return None
    return pair[0].reshape(-1, pair[0].shape[-1]), pair[1].reshape(-1, pair[1].shape[-1])


def _inputs(linears: Sequence[nn.Linear], hidden: int, heads: HeadLayout) -> Iterator[tuple[nn.Linear, ...]]:
    """Ways to take them as (queries, keys, values), or as one for all three, that fit by their widths."""
    for count in (3, 1):
        for ins in permutations([linear for linear in linears if linear.in_features == hidden], count):
            widths = tuple(linear.out_features for linear in ins)
            if widths == heads.sizes or (count == 1 and widths == (sum(heads.sizes),)):
                yield ins


def _form(
    x: torch.Tensor, expected: torch.Tensor, norms: Sequence[RMSNorm], tables: Tables | None
) -> HeadForm | None:
    """What makes expected [num_tokens, heads, head_size] of x [num_tokens, heads * head_size]."""
    size = expected.shape[-1]
    # Tables with other rows than one a token mean something else.
    styles = _STYLES if tables is not None and len(tables[0]) == len(x) else []
    for norm in (None, *(norm for norm in norms if norm.weight.numel() in (size, x.shape[1]))):
        wide = norm is not None and norm.weight.numel() != size
        y = x if wide else x.reshape(expected.shape)
        y = y if norm is None else rms_norm_torch(y, norm)
        y = y.reshape(expected.shape)
        for style in (None, *styles):
            if close(_turned(y, style, tables), expected):
                return HeadForm(norm, wide, style)
    return None


def _turned(x: torch.Tensor, style: RotaryStyle | None, tables: Tables | None) -> torch.Tensor:
    """x [num_tokens, heads, head_size], rotated by the tables in this style; of no tokens if it does not fit."""
    if style is None or tables is None:
        return x
    rotary = style.rotary(style.tables(*tables), None)
    return rotate_torch(x, rotary) if 2 * rotary.cos.shape[1] <= x.shape[-1] else x[:0]


def _reproduces(fused: FusedAttention, call: Call, seen: StandIn) -> bool:
    """Whether the fused attention hands over what was seen, and gives what was given."""
    again = StandIn(seen.spec, len(seen.out), seen.out)
    trial, tables = replace(fused, layer=again), position_tables(call.kwargs)
    rotary = None
    if fused.query.style is not None and tables is not None:
        rotary = fused.query.style.rotary(fused.query.style.tables(*tables), None)
    result = trial.out(trial.attend(trial.qkv(call.hidden), rotary))
    return again.agrees_with(seen) and close(result, call.result)
