"""A hybrid as one loop over fused layers: each a mixer or attention, then a gated network, on a residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model_states.components import AttentionLayer
from model_states.kernels.add_norm import RMSNorm
from model_states.rewrites.attention import FusedAttention, recognise_attention
from model_states.rewrites.backbone import FusedBackbone, PositionTables
from model_states.rewrites.layers import (
    Boundary,
    FusedLayer,
    LayerForm,
    OpaqueMLP,
    into_next,
    recognise_layer,
)
from model_states.rewrites.mixer import Mixer
from model_states.rewrites.mlp import recognise_mlp
from model_states.rewrites.norms import recognise_norm
from model_states.rewrites.seen import Call, StandIn, close, floats_of, random_like, watched
from model_states.transformers_bridge import AttentionCall, TransformersModel

_NUM_TOKENS = 24  # of the pass that is watched


@dataclass(frozen=True, slots=True)
class _Watched:
    """One pass over random tokens, with stand-ins for attention and mixers: calls by module, and its outer calls."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    hidden_states: torch.Tensor
    by_module: Mapping[int, Call]
    outer: Sequence[Call]  # of modules outside the layers


@torch.no_grad()
def recognise_hybrid(
    model: TransformersModel,
    calls: Sequence[AttentionCall],
    attentions: Sequence[AttentionLayer],
    max_model_len: int,
) -> FusedBackbone | None:
    """The loop that `model.backbone` runs, held to its own numbers; None where a layer is of another form.

    The caller binds attention anew afterwards: `attentions` for `calls`.
    """
    layers = list(getattr(model.backbone, "layers", ()))
    blocks = [_block_of(layer, calls) for layer in layers]
    if any(block is None for block in blocks) or len({id(call.module) for call in calls}) < len(calls):
        return None
    stand_ins = {id(call.module): StandIn(call.spec, _NUM_TOKENS, call.key) for call in calls}
    model.bind(calls, [stand_ins[id(call.module)] for call in calls])
    with _standing_in(model.backbone):
        seen = _watch(model, layers, max_model_len)
        tables = PositionTables([c for c in seen.outer if _is_pair(c.output)], seen.positions, max_model_len)
        by_attention = {id(call.module): layer for call, layer in zip(calls, attentions, strict=True)}
        fused: list[FusedLayer] = []
        previous: LayerForm | None = None
        for layer, block in zip(layers, blocks, strict=True):
            found = _recognise(seen.by_module[id(layer)], block, stand_ins, by_attention, tables, previous)
            if found is None:
                return None
            previous, one = found
            fused.append(one)
    around = _around(model, seen, layers)
    return None if around is None else FusedBackbone(*around[:2], fused, into_next(previous, around[2]))


def _block_of(layer: nn.Module, calls: Sequence[AttentionCall]) -> nn.Module | None:
    """The mixer or the attention of a layer; None where it has none, or more than one."""
    attention = {id(call.module) for call in calls}
    found = [m for m in layer.modules() if isinstance(m, Mixer) or id(m) in attention]
    return found[0] if len(found) == 1 else None


@contextmanager
def _standing_in(backbone: nn.Module) -> Iterator[None]:
    """Every mixer answers with random numbers, since there is no step."""
    mixers = [module for module in backbone.modules() if isinstance(module, Mixer)]
    for mixer in mixers:
        mixer.stand_in = random_like(mixer.out.weight, _NUM_TOKENS, len(mixer.out.weight), seed=3)
    try:
        yield
    finally:
        for mixer in mixers:
            mixer.stand_in = None


def _watch(model: TransformersModel, layers: Sequence[nn.Module], max_model_len: int) -> _Watched:
    device = model.model.device
    positions = (3 * torch.arange(_NUM_TOKENS, device=device) + 1) % max_model_len
    input_ids = (7919 * torch.arange(_NUM_TOKENS, device=device) + 11) % model.vocab_size
    inside = {id(part) for layer in layers for part in layer.modules()}
    with watched(model.backbone.modules()) as calls:
        hidden_states = model.forward(input_ids, positions)
    by_module = {id(call.module): call for call in calls}
    outer = [call for call in calls if id(call.module) not in inside]
    return _Watched(input_ids, positions, hidden_states, by_module, outer)


def _recognise(
    call: Call,
    block: Any,
    stand_ins: Mapping[int, StandIn],
    attentions: Mapping[int, AttentionLayer],
    tables: PositionTables,
    previous: LayerForm | None,
) -> tuple[LayerForm, FusedLayer] | None:
    """Call a layer again with random hidden states, and say what it is."""
    layer = call.module
    with watched({*layer.children(), block, layer}) as seen:
        call.repeat(random_like(call.hidden, *call.hidden.shape, seed=2))
    own, inner = (next(c for c in seen if c.module is module) for module in (layer, block))
    known = recognise_layer(own, [c for c in seen if c.module is not layer], block)
    if known is None:
        return None
    form, mlp = known
    sublayer: Any = block
    if not isinstance(block, Mixer):
        sublayer = _attention(inner, stand_ins[id(block)], attentions[id(block)], tables)
    if sublayer is None or getattr(sublayer, "in_multiplier", None) is not None:
        return None
    return form, FusedLayer(
        into_next(previous, form.before_attention),
        sublayer,
        Boundary(form.after_attention, form.multiplier, form.before_mlp),
        recognise_mlp(mlp.module) or OpaqueMLP(mlp.module),
    )


def _attention(
    call: Call, stand_in: StandIn, layer: AttentionLayer, tables: PositionTables
) -> FusedAttention | None:
    found = recognise_attention(call, stand_in) if _is_pair(call.output) else None
    if found is None:
        return None
    if found.query.style is not None:
        found.tables = tables.of(call.kwargs, found.query.style)
        if found.tables is None:
            return None
    found.layer = layer
    return found


def _is_pair(output: object) -> bool:
    return isinstance(output, tuple) and len(output) == 2


def _around(
    model: TransformersModel, seen: _Watched, layers: Sequence[nn.Module]
) -> tuple[nn.Module, float, RMSNorm] | None:
    """The embedding, what its result is multiplied with, and the norm after the layers."""
    embedding = model.model.get_input_embeddings()
    first, last = (seen.by_module[id(layer)] for layer in (layers[0], layers[-1]))
    embedded = embedding(seen.input_ids)
    multipliers = (1.0, *floats_of(model.backbone))
    multiplier = next((m for m in multipliers if close(embedded * m, first.hidden)), None)
    ends = [recognise_norm(call.module) for call in seen.outer if _same_hidden(call, last.result)]
    norm = next((norm for norm in ends if norm is not None), None)
    return None if multiplier is None or norm is None else (embedding, multiplier, norm)


def _same_hidden(call: Call, hidden: torch.Tensor) -> bool:
    if not isinstance(call.output, torch.Tensor) or call.output.shape[-1] != hidden.shape[-1]:
        return False
    return close(call.hidden, hidden) if call.hidden.shape == hidden.shape else False
