"""Attention whose keys and values are expanded from one latent vector of each token: the latent is what is cached.

Such a layer computes, for every token, a latent c [rank] and a rotated key k_rope [rope] that all heads share,
and for every head h

    key[h] = cat(W_k[h] c, k_rope)        value[h] = W_v[h] c

where W_k and W_v are the rows of one projection. A query q[h] = cat(q_nope, q_rope) then scores
q_nope . W_k[h] c + q_rope . k_rope = cat(W_k[h]^T q_nope, q_rope) . cat(c, k_rope), and sum_p w_p W_v[h] c_p =
W_v[h] sum_p w_p c_p. So attention over the cache is that of one kv head with key cat(c, k_rope) and value c, and
only rank + rope numbers of a token are kept, whatever the number of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from model_states.attention import AttentionSpec
from model_states.transformers_bridge import ATTN_IMPLEMENTATION, AttentionCall

_PROJECTION = (
    "kv_b_proj"  # what transformers calls the projection of a latent to the keys and values of all heads
)

PagedLayer = Callable[..., torch.Tensor]


class _Projection(nn.Module):
    """Stands in a layer's place for its projection, to see the latents that it is given.

    Once absorbed, paged attention has no use for what it projects, so it is not computed. transformers' own
    attention still gets it.
    """

    def __init__(self, linear: nn.Linear, owner: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.absorbed = False
        self.latent = self.expanded = linear.weight[:0]
        self._config: Any = owner.config

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """The projection of latent [.., rank]; when it is not needed, a tensor of that shape, [.., out]."""
        self.latent = latent
        if self.absorbed and self._config._attn_implementation == ATTN_IMPLEMENTATION:
            return latent[..., :1].expand(*latent.shape[:-1], self.linear.out_features)
        expanded: torch.Tensor = self.linear(latent)
        if not self.absorbed:
            self.expanded = expanded
        return expanded

    def take(self) -> torch.Tensor:
        """The latents of this step, [num_tokens, rank]; they are let go, so that memory is not held by every layer."""
        latent, self.latent = self.latent, self.linear.weight[:0]
        return latent.reshape(-1, latent.shape[-1])


@contextmanager
def watched_projections(model: nn.Module) -> Iterator[None]:
    """Within, every such projection records what goes through it; after, those not absorbed are as they were."""
    owners = [module for module in model.modules() if _can_be_absorbed(getattr(module, _PROJECTION, None))]
    for module in owners:
        setattr(module, _PROJECTION, _Projection(getattr(module, _PROJECTION), module))
    try:
        yield
    finally:
        for module in owners:
            projection = getattr(module, _PROJECTION)
            projection.latent = projection.expanded = projection.linear.weight[:0]
            if not projection.absorbed:
                setattr(module, _PROJECTION, projection.linear)


def _can_be_absorbed(linear: object) -> bool:
    return type(linear) is nn.Linear and linear.bias is None


class LatentAttention:
    """The attention of one layer over a cache of latents; called like the layer that it stands for."""

    def __init__(self, call: AttentionCall) -> None:
        """`call` must be one that `is_latent`."""
        self._projection: _Projection = getattr(call.module, _PROJECTION)
        self._projection.absorbed = True
        linear, heads = self._projection.linear, call.spec.num_heads
        self._nope = linear.out_features // heads - call.spec.head_size_v
        # Views of the model's own weight: [num_heads, nope, rank] and [num_heads, rank, head_size_v].
        weight = linear.weight.view(heads, -1, linear.in_features)
        self._to_latent = weight[:, : self._nope]
        self._from_latent = weight[:, self._nope :].transpose(1, 2)
        self.spec: AttentionSpec = replace(
            call.spec,
            num_kv_heads=1,
            head_size=linear.in_features + call.spec.head_size - self._nope,
            head_size_v=linear.in_features,
            value_from_key=True,
        )
        self.layer: PagedLayer | None = None

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of query [num_tokens, num_heads, nope + rope]; returns [num_tokens, num_heads, head_size_v].

        Of key [num_tokens, num_heads, nope + rope] only the rotated part is real. value is not used.
        """
        assert self.layer is not None, "the layer was called before it had a cache"
        nope, rope = query.split((self._nope, query.shape[-1] - self._nope), -1)
        absorbed = torch.bmm(nope.transpose(0, 1), self._to_latent).transpose(0, 1)
        cached = torch.cat((self._projection.take(), key[:, 0, self._nope :]), -1)[:, None]
        out = self.layer(torch.cat((absorbed, rope), -1), cached, None, sinks)
        return torch.bmm(out.transpose(0, 1), self._from_latent).transpose(0, 1)


def is_latent(call: AttentionCall) -> bool:
    """Whether the keys and values of a watched call were, number for number, what absorption takes them to be.

    A layer that puts anything between the projection and attention (a norm, another order) is not.
    """
    projection = getattr(call.module, _PROJECTION, None)
    if not isinstance(projection, _Projection) or not projection.expanded.numel():
        return False
    heads, size_v = call.spec.num_heads, call.spec.head_size_v
    per_head, rest = divmod(projection.linear.out_features, heads)
    nope = per_head - size_v
    if rest or call.spec.num_kv_heads != heads or not 0 < nope < call.spec.head_size:
        return False
    expanded = projection.expanded.view(-1, heads, per_head)
    key, rope = call.key.split((nope, call.key.shape[-1] - nope), -1)
    return (
        expanded.shape[0] == key.shape[0]
        and bool(expanded.any(-1).all())  # zeros would look like anything
        and torch.equal(expanded[..., :nope], key)
        and torch.equal(expanded[..., nope:], call.value)
        and torch.equal(rope, rope[:, :1].expand_as(rope))
    )
