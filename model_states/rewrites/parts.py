"""Rewrites of single modules inside transformers' own layers, for models that are not rewritten as a whole.

A module's `forward` is replaced on the instance: it stays in its place, with its parameters and their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from model_states.kernels.add_norm import RMSNorm
from model_states.rewrites.attention import FusedAttention, position_tables
from model_states.rewrites.mlp import GatedMLP, recognise_mlp
from model_states.rewrites.norms import norm_rows, recognise_norm


def rewrite_parts(root: nn.Module, attentions: Mapping[nn.Module, FusedAttention]) -> dict[str, int]:
    """Replace attentions as given, and every gated network and RMS norm under `root`; returns how many of each."""
    modules = list(root.modules())
    mlps = {module: mlp for module in modules if (mlp := recognise_mlp(module)) is not None}
    norms = {module: norm for module in modules if (norm := recognise_norm(module)) is not None}
    for module, attention in attentions.items():
        _replace(module, _attention_forward(attention))
    for module, mlp in mlps.items():
        _replace(module, _mlp_forward(mlp))
    for module, norm in norms.items():
        _replace(module, _norm_forward(norm))
    return {"attentions": len(attentions), "feed-forward networks": len(mlps), "norms": len(norms)}


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


def _attention_forward(attention: FusedAttention) -> Callable[..., tuple[torch.Tensor, None]]:
    style = attention.query.style

    def forward(hidden_states: torch.Tensor, *_: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        tables, rotary = position_tables(kwargs), None
        if style is not None and tables is not None:
            rotary = style.rotary(style.tables(*tables), None)
        out = attention.out(attention.attend(attention.qkv(hidden_states[0]), rotary))
        return out[None], None

    return forward


def _mlp_forward(mlp: GatedMLP) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return mlp(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


def _norm_forward(norm: RMSNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return norm_rows(x.reshape(-1, x.shape[-1]), norm).view(x.shape)

    return forward
