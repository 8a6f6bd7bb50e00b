"""A model of mixers alone as a plain loop: norm, mixer, norm, mixer, on a residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model_states.kernels.add_norm import RMSNorm, add_norm
from model_states.kernels.linear import norm_linear
from model_states.rewrites.mixer import Mixer
from model_states.rewrites.norms import recognise_norm
from model_states.rewrites.products import Rows

# More rows of a residual stream in fp32 are normed faster apart from the product.
_FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class MixerBackbone:
    """Embedding, blocks of a norm and a mixer, and the norm at the end. residual_dtype: of the residual stream."""

    embedding: nn.Module
    blocks: list[tuple[RMSNorm, Mixer]]
    end: RMSNorm
    residual_dtype: torch.dtype

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens, hidden] of int64 input_ids [num_tokens]; positions say nothing here."""
        embedded: torch.Tensor = self.embedding(input_ids)
        residual = embedded.to(self.residual_dtype, copy=True)
        out = torch.empty_like(embedded)
        return (self.few_rows if len(input_ids) <= _FEW_ROWS else self.many_rows)(residual, out)

    def few_rows(self, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Hidden states, in `out`, of an embedded step of few tokens: norms and adds are done by the products."""
        for norm, mixer in self.blocks:
            qkv = norm_linear(residual, norm, mixer.qkv.weight, mixer.qkv.bias)
            residual = mixer.out.added(mixer.attend(qkv, None), residual)
        _add_and_norm(None, residual, self.end, out)
        return out

    def many_rows(self, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The same for any number of tokens; residual is overwritten."""
        x: Rows | None = None
        for norm, mixer in self.blocks:
            _add_and_norm(x, residual, norm, out)
            x = mixer.out.of(mixer.attend(mixer.qkv(out), None))
        _add_and_norm(x, residual, self.end, out)
        return out


def _add_and_norm(x: Rows | None, residual: torch.Tensor, norm: RMSNorm, out: torch.Tensor) -> None:
    if x is None:
        add_norm(residual, None, None, norm, 1.0, out)
    else:
        rows, root = (x, None) if isinstance(x, torch.Tensor) else x
        add_norm(rows, residual, None, norm, 1.0, out, root)


def recognise_mixer_backbone(backbone: Any) -> MixerBackbone | None:
    """The loop of a backbone whose every layer is a norm and a mixer; None for another."""
    layers = list(getattr(backbone, "layers", ()))
    if not all(set(dict(layer.named_children())) == {"norm", "mixer"} for layer in layers):
        return None
    norms = [recognise_norm(module) for module in (*(layer.norm for layer in layers), backbone.norm_f)]
    known = [norm for norm in norms if norm is not None]
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, Mixer)]
    if len(known) != len(layers) + 1 or len(mixers) < len(layers):
        return None
    if any(mixer.in_multiplier is not None for mixer in mixers):
        return None
    embedding = backbone.get_input_embeddings()
    wide = all(getattr(layer, "residual_in_fp32", False) for layer in layers)
    return MixerBackbone(
        embedding,
        list(zip(known[:-1], mixers, strict=True)),
        known[-1],
        torch.float32 if wide else embedding.weight.dtype,
    )
