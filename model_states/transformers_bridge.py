"""Run a transformers model on flat tokens: its attention calls arrive here and go to paged attention layers.

transformers looks an attention implementation up by name and calls it with the attention module, so one function
serves every architecture that uses that interface. It also builds no mask for a name that has no mask function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model_states.attention import AttentionSpec
from model_states.errors import UnsupportedModelError

ATTN_IMPLEMENTATION = "model_states_paged"
_LAYER = "_model_states_layer"

# Keyword arguments of an attention call that do not change its result on our path.
_NEUTRAL = frozenset(
    "position_ids position_embeddings cache past_key_values past_key_value use_cache cache_position "
    "output_attentions output_hidden_states output_router_logits dropout return_dict logits_to_keep "
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k cumulative_seqlens_q cumulative_seqlens_k".split()
)

AttentionFn = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call seen while probing: the module that made it, what it needs, and what it passed."""

    module: nn.Module
    spec: AttentionSpec
    key: torch.Tensor  # [2, num_kv_heads, head_size], of the two tokens that were probed
    value: torch.Tensor  # [2, num_kv_heads, head_size_v]


class _Probe:
    """Records the attention calls of one forward pass; answers zeros of the right shape."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.calls: list[AttentionCall] = []

    def record(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        odd = sorted(n for n, v in options.pop("other").items() if n not in _NEUTRAL and v is not None)
        if options.pop("mask") is not None:
            odd.append("attention_mask")
        if getattr(module, "is_causal", True) is False or options.pop("is_causal") is False:
            odd.append("is_causal=False")
        if odd:
            raise UnsupportedModelError(
                f"{self.architecture}: {type(module).__name__} passes {', '.join(odd)} to attention, which paged "
                "attention cannot honour; use a model state made for this architecture"
            )
        scale = options["scaling"]
        self.calls.append(
            AttentionCall(
                module,
                AttentionSpec(
                    num_heads=query.shape[1],
                    num_kv_heads=key.shape[1],
                    head_size=query.shape[-1],
                    head_size_v=value.shape[-1],
                    scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
                    sliding_window=options["sliding_window"] or None,
                    soft_cap=options["softcap"] or None,
                    has_sinks=options["s_aux"] is not None,
                ),
                key[0].transpose(0, 1),
                value[0].transpose(0, 1),
            )
        )
        return query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [1, heads, tokens, size] in, [1, tokens, heads, size] out."""
    layer: AttentionFn | _Probe = getattr(module, _LAYER)
    if isinstance(layer, _Probe):
        options = {
            "scaling": scaling,
            "sliding_window": sliding_window,
            "softcap": softcap,
            "s_aux": s_aux,
            "is_causal": is_causal,
        }
        out = layer.record(module, query, key, value, mask=attention_mask, other=other, **options)
    else:
        out = layer(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), s_aux)
    return out[None], None


def register_attention() -> None:
    """Make `ATTN_IMPLEMENTATION` known to transformers; calling it again changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTN_IMPLEMENTATION, _attention_forward)


class TransformersModel:
    """A transformers `...ForCausalLM` as two functions: hidden states of flat tokens, and logits of some of them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.architecture = type(model).__name__
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.backbone: nn.Module = model.base_model
        # Rewrites of the backbone (of input ids and positions) and of the head; see model_states/rewrites.
        self.fused: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self.fused_head: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._head = _head_only(model)

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden] of int64 input_ids and positions [num_tokens].

        With inputs of its own a step goes through transformers' backbone, which `fused` knows nothing of.
        """
        if self.fused is not None and not inputs:
            return self.fused(input_ids, positions)
        outputs = self.backbone(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **inputs
        )
        hidden_states: torch.Tensor = outputs[0][0]
        return hidden_states

    @torch.inference_mode()
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden_states [n, hidden], with the model's own scaling and soft cap."""
        if self.fused_head is not None:
            return self.fused_head(hidden_states)
        logits: torch.Tensor = self._head(inputs_embeds=hidden_states[None]).logits[0]
        return logits

    def attention_calls(self, *, every_layer: bool = True) -> list[AttentionCall]:
        """The attention layers in call order, found by running two tokens through the model.

        every_layer: each layer makes one call and nothing else keeps state; False leaves that to the caller, who knows
        of the other layers. Raises `UnsupportedModelError` when the attention of a layer is of a kind that paged
        attention cannot serve, or when some layers keep state elsewhere.
        """
        probe = _Probe(self.architecture)
        for module in self.model.modules():
            setattr(module, _LAYER, probe)
        positions = torch.arange(2, device=self.model.device)
        # Not the first ids: the embedding of a padding token may be zero, which looks like anything.
        self.forward((positions + self.vocab_size // 2) % self.vocab_size, positions)
        if every_layer:
            _check_layers(self.architecture, self.config, probe.calls)
        return probe.calls

    def bind(self, calls: Sequence[AttentionCall], layers: Sequence[AttentionFn]) -> None:
        """From now on, the attention of `calls[i].module` is `layers[i]`."""
        for call, layer in zip(calls, layers, strict=True):
            setattr(call.module, _LAYER, layer)


class _PassThrough(nn.Module):
    """Stands where a backbone was: gives back the embeddings it is handed as its hidden states."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_backbone", backbone)  # not a submodule of the head

    def __getattr__(self, name: str) -> Any:
        """Some heads read a setting of the backbone."""
        return getattr(self.__dict__["_backbone"], name)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _HiddenStates:
        return _HiddenStates(inputs_embeds)

    @property
    def decoder(self) -> _PassThrough:
        """Some heads call the decoder inside the backbone."""
        return self


class _HiddenStates:
    """The output of a backbone in which everything but the hidden states is None."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.last_hidden_state = hidden_states

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _head_only(model: Any) -> Any:
    """The same causal LM with its backbone passed through: what is left is its head, scaling and soft cap included.

    It shares every weight with `model`; only the table of submodules is a copy.
    """
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = _PassThrough(model.base_model)
    return head


def _check_layers(architecture: str, config: Any, calls: Sequence[AttentionCall]) -> None:
    """Refuse a model whose layers do something else than one causal attention each."""
    expected = config.num_hidden_layers
    if len(calls) != expected or len({id(call.module) for call in calls}) != expected:
        raise UnsupportedModelError(
            f"{architecture} has {expected} layers but made {len(calls)} attention calls: some of its layers keep "
            "state that is not attention; install a plugin whose model state serves it (core-runner plugins)"
        )
    layer_types = getattr(config, "layer_types", None) or []
    for index, kind in enumerate(layer_types[:expected]):
        window = calls[index].spec.sliding_window
        if kind not in ("full_attention", "sliding_attention") or (
            kind == "sliding_attention" and not window
        ):
            raise UnsupportedModelError(
                f"{architecture}: layer {index} is of type {kind!r}, which paged attention does not serve "
                f"(window passed to attention: {window})"
            )


def refuse_batch_dependent_rope(architecture: str, config: Any, max_model_len: int) -> None:
    """Refuse rotary embeddings whose frequencies depend on the longest sequence of a batch.

    With those, one request's length would change its neighbours' tokens.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict) and "rope_type" in p]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type", "default")
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in ("dynamic", "longrope") and max_model_len > limit:
            raise UnsupportedModelError(
                f"{architecture}: rope type {kind!r} changes its frequencies beyond {limit} tokens, for the whole "
                f"batch at once; pass max_model_len={limit} or less (it is {max_model_len})"
            )
