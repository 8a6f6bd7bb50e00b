"""Rewrite what is recognised of a loaded model: all of it as one loop, or else the parts that are known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from model_states.components.paged_attention import AttentionLayer
from model_states.kernels.add_norm import RMSNorm
from model_states.rewrites.attention import FusedAttention, recognise_attention
from model_states.rewrites.backbone import FusedBackbone, PositionTables
from model_states.rewrites.experts import rewrite_experts
from model_states.rewrites.head import recognise_head
from model_states.rewrites.layers import (
    Boundary,
    FusedLayer,
    LayerForm,
    OpaqueMLP,
    into_next,
    recognise_layer,
)
from model_states.rewrites.mlp import recognise_mlp
from model_states.rewrites.norms import recognise_norm
from model_states.rewrites.parts import rewrite_parts
from model_states.rewrites.rehearsal import rehearse
from model_states.rewrites.seen import Call, StandIn, close, floats_of, random_like, watched
from model_states.transformers_bridge import AttentionCall, AttentionFn, TransformersModel

logger = logging.getLogger(__name__)

_NUM_TOKENS = 24  # of the pass that is watched


@dataclass(slots=True)
class _Found:
    """What is known of one decoder layer."""

    call: Call
    attention_module: nn.Module
    attention: FusedAttention | None = None
    form: LayerForm | None = None
    mlp: nn.Module | None = None


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of transformers' own modules over random tokens, with stand-ins for attention."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    hidden_states: torch.Tensor
    layers: list[Call]  # by attention call
    others: list[Call]  # of modules outside the layers
    stand_ins: list[StandIn]


@torch.no_grad()
def fuse_layers(
    model: TransformersModel,
    calls: Sequence[AttentionCall],
    layers: Sequence[AttentionFn],
    max_model_len: int,
) -> None:
    """Rewrite `model`, whose attention calls are served by `layers`, as far as it is recognised.

    Structure is found by watching the model's modules on random inputs, and a rewrite is kept only where it gives
    the same numbers. Where every layer and the backbone are known, `model.forward` becomes a loop over fused layers;
    otherwise known attentions, gated networks and norms are rewritten in their places. Logs which.
    """
    rewrite_experts(model.backbone)
    seen = _watch_pass(model, calls, max_model_len)
    if _on_gpu(model):
        rehearse(lambda: _launch_all(model, seen, calls[0], max_model_len))
    model.fused_head = recognise_head(model)
    found = [
        _recognise(call, attention, stand_in)
        for call, attention, stand_in in zip(seen.layers, calls, seen.stand_ins, strict=True)
    ]
    whole = _whole(model, seen, found, max_model_len)
    model.bind(calls, layers)
    for known, layer in zip(found, layers, strict=True):
        if known.attention is not None and isinstance(layer, AttentionLayer):
            known.attention.layer = layer
        else:
            known.attention = None
    if whole is not None and all(known.attention is not None for known in found):
        model.fused = whole
        logger.info("%s: all %d layers are fused", model.architecture, len(found))
        return
    attentions = {k.attention_module: k.attention for k in found if k.attention is not None}
    counts = rewrite_parts(model.backbone, attentions)
    parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    logger.info("%s: fused in place: %s", model.architecture, parts or "nothing")


def _on_gpu(model: TransformersModel) -> bool:
    return bool(model.model.device.type == "cuda")


def _watch_pass(model: TransformersModel, calls: Sequence[AttentionCall], max_model_len: int) -> _Pass:
    device = model.model.device
    positions = (3 * torch.arange(_NUM_TOKENS, device=device) + 1) % max_model_len
    input_ids = (7919 * torch.arange(_NUM_TOKENS, device=device) + 11) % model.vocab_size
    stand_ins = [StandIn(call.spec, _NUM_TOKENS, call.key) for call in calls]
    model.bind(calls, stand_ins)
    names = {id(module): name for name, module in model.backbone.named_modules()}
    layers = [_layer_of(model.backbone, names[id(call.module)]) for call in calls]
    inside = {id(part) for layer in layers for part in layer.modules()} - {id(layer) for layer in layers}
    with watched(part for part in model.backbone.modules() if id(part) not in inside) as seen:
        hidden_states = model.forward(input_ids, positions)
    by_layer = {id(call.module): call for call in seen}
    return _Pass(
        input_ids,
        positions,
        hidden_states,
        [by_layer[id(layer)] for layer in layers],
        [call for call in seen if not any(call.module is layer for layer in layers)],
        stand_ins,
    )


def _layer_of(backbone: nn.Module, name: str) -> nn.Module:
    """The member of a list of layers that holds the module of this name; without a list the module itself."""
    path = name.split(".")
    for depth in range(1, len(path)):
        if isinstance(backbone.get_submodule(".".join(path[:depth])), nn.ModuleList):
            return backbone.get_submodule(".".join(path[: depth + 1]))
    return backbone.get_submodule(name)


def _recognise(call: Call, attention: AttentionCall, stand_in: StandIn) -> _Found:
    """Call the layer again with random hidden states, and say what is known of it."""
    layer, module = call.module, attention.module
    found = _Found(call, module)
    hidden = random_like(call.hidden, *call.hidden.shape, seed=2)
    with watched({*layer.children(), module, layer}) as seen:
        call.repeat(hidden)
    own = next(c for c in seen if c.module is layer)
    inner = [c for c in seen if c.module is module]
    if len(inner) != 1 or not isinstance(inner[0].output, tuple) or len(inner[0].output) != 2:
        return found
    found.attention = recognise_attention(inner[0], stand_in)
    children = [c for c in seen if c.module is not layer]
    known = recognise_layer(own, children, module)
    if known is not None:
        found.form, found.mlp = known[0], known[1].module
    return found


def _launch_all(model: TransformersModel, seen: _Pass, first: AttentionCall, max_model_len: int) -> None:
    """Launch every kernel that the checks of the head, of layers like the first one and of their loop launch."""
    recognise_head(model)
    known = _recognise(seen.layers[0], first, seen.stand_ins[0])
    backbone = _loop(model, seen, [known], max_model_len)
    if backbone is not None:
        for run in _ways(backbone):
            run(backbone.embed(seen.input_ids), seen.positions)


def _whole(
    model: TransformersModel, seen: _Pass, found: Sequence[_Found], max_model_len: int
) -> FusedBackbone | None:
    """The model as one loop, if every layer and what is around them is known and it gives the same."""
    backbone = _loop(model, seen, found, max_model_len)
    if backbone is None:
        return None
    for run in _ways(backbone):
        # Attention is still the stand-ins'; a whole model adds up the rounding of its layers.
        hidden_states = run(backbone.embed(seen.input_ids), seen.positions)
        if not close(hidden_states, seen.hidden_states, slack=10):
            return None
    return backbone


def _ways(backbone: FusedBackbone) -> list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Both ways to run it, or the one that there is."""
    return [backbone.many_rows, backbone.few_rows] if backbone.plain else [backbone.many_rows]


def _loop(
    model: TransformersModel, seen: _Pass, found: Sequence[_Found], max_model_len: int
) -> FusedBackbone | None:
    """A loop over the layers that were found, if all of each and what is around them is known."""
    tables = PositionTables(_rotary_calls(seen), seen.positions, max_model_len)
    layers: list[FusedLayer] = []
    previous: LayerForm | None = None
    for known in found:
        layer = _fused_layer(known, previous, tables)
        if layer is None:
            return None
        layers.append(layer)
        previous = known.form
    around = _around(model, seen)
    if around is None:
        return None
    embedding, multiplier, norm = around
    return FusedBackbone(embedding, multiplier, layers, into_next(previous, norm))


def _fused_layer(known: _Found, previous: LayerForm | None, tables: PositionTables) -> FusedLayer | None:
    attention, form, mlp = known.attention, known.form, known.mlp
    if attention is None or form is None or mlp is None:
        return None
    style = attention.query.style
    if style is not None:
        attention.tables = tables.of(known.call.kwargs, style)
        if attention.tables is None:
            return None
    return FusedLayer(
        into_next(previous, form.before_attention),
        attention,
        Boundary(form.after_attention, form.multiplier, form.before_mlp),
        recognise_mlp(mlp) or OpaqueMLP(mlp),
    )


def _rotary_calls(seen: _Pass) -> list[Call]:
    """Calls outside the layers that gave a pair of tensors."""
    return [call for call in seen.others if isinstance(call.output, tuple) and len(call.output) == 2]


def _around(model: TransformersModel, seen: _Pass) -> tuple[nn.Module, float, RMSNorm] | None:
    """The embedding, what its result is multiplied with, and the norm after the layers."""
    embedding = model.model.get_input_embeddings()
    embedded = embedding(seen.input_ids)
    first, last = seen.layers[0].hidden, seen.layers[-1].result
    multipliers = (1.0, *floats_of(model.backbone))
    multiplier = next((m for m in multipliers if close(embedded * m, first)), None)
    ends = [c for c in seen.others if c.result.shape == last.shape and close(c.result, seen.hidden_states)]
    norms = [recognise_norm(call.module) for call in ends if close(call.hidden, last)]
    norm = next((norm for norm in norms if norm is not None), None)
    return None if multiplier is None or norm is None else (embedding, multiplier, norm)
