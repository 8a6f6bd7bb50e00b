"""Layers that keep a state of fixed size: each takes the place of a transformers module and shares its weights."""

from __future__ import annotations

from typing import Any

import torch

from model_states import CacheTensor, ModelConfig
from model_states.components.recurrent_state import state_dtype
from model_states.kernels.rope_write import Rotary
from model_states.rewrites.mixer import Mixer, check_silu
from model_states.rewrites.products import Projection, merged
from model_states_linear.kernels.delta_chunks import DeltaInputs, DeltaWeights
from model_states_linear.kernels.gated_delta import gated_delta
from model_states_linear.kernels.gated_norm import gated_norm


class ShortConvolution(Mixer):
    """A convolution of few tokens between two gates; the inputs of the convolution are all of its state."""

    def __init__(self, original: Any) -> None:
        super().__init__(original.conv, merged([original.in_proj]), merged([original.out_proj]))

    def attend(self, qkv: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Gate, convolution, gate."""
        before, after, x = qkv.chunk(3, -1)
        return after * self._convolve(before * x, silu=False)


class GatedDeltaNet(Mixer):
    """Queries, keys and values through a convolution into the gated delta rule, and a gated norm of each head.

    One product gives [q | k | v | gate | b | a]; families differ in where its rows come from.
    """

    def __init__(self, original: Any) -> None:
        check_silu(original)
        super().__init__(original.conv1d, self._into(original), merged([self._out(original)]))
        self.num_heads, self.num_key_heads = int(original.num_v_heads), int(original.num_k_heads)
        self.value_size, self.key_size = int(original.head_v_dim), int(original.head_k_dim)
        max_beta = 2.0 if getattr(original, "allow_neg_eigval", False) else 1.0
        self.weights = DeltaWeights(-original.A_log.float().exp(), original.dt_bias.float(), max_beta)
        norm = self._norm(original)
        self.norm_weight, self.norm_eps = norm.weight, float(norm.variance_epsilon)

    def _into(self, original: Any) -> Projection:
        return merged([getattr(original, f"in_proj_{part}") for part in ("qkv", "z", "b", "a")])

    def _out(self, original: Any) -> Any:
        return original.out_proj

    def _norm(self, original: Any) -> Any:
        return original.norm

    def state_tensors(self, config: ModelConfig) -> dict[str, CacheTensor]:
        """The inputs that the convolution keeps, and one matrix [value size, key size] for each head."""
        shape = (self.num_heads, self.value_size, self.key_size)
        return {**super().state_tensors(config), "delta": CacheTensor(shape, state_dtype(config))}

    def attend(self, qkv: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Convolution, delta rule, and gated norm."""
        num_heads = self.num_heads
        by_key, by_value = self.num_key_heads * self.key_size, num_heads * self.value_size
        sizes = [2 * by_key + by_value, by_value, num_heads, num_heads]
        mixed, gate, b, a = qkv.split(sizes, -1)
        q, k, v = self._convolve(mixed, silu=True).split([by_key, by_key, by_value], -1)
        q, k = (part.unflatten(1, (self.num_key_heads, self.key_size)) for part in (q, k))
        v = v.unflatten(1, (num_heads, self.value_size))
        y = v.new_empty(v.shape)
        pool, step = self.layer.tensors["delta"], self.layer.step
        gated_delta(DeltaInputs(q, k, v, a, b), self.weights, pool, step, y)
        gated_norm(y, gate, self.norm_weight, self.norm_eps, y)
        flat: torch.Tensor = y.flatten(1)
        return flat


class InterleavedDeltaNet(GatedDeltaNet):
    """Its projections keep together what belongs to one key head: their rows are put in order, once."""

    def _into(self, original: Any) -> Projection:
        num_key_heads, key_size = int(original.num_k_heads), int(original.head_k_dim)
        by_head = int(original.num_v_heads) // num_key_heads
        by_value = by_head * int(original.head_v_dim)
        sizes = [key_size, key_size, by_value, by_value]
        rows = original.in_proj_qkvz.weight.unflatten(0, (num_key_heads, -1)).split(sizes, 1)
        gates = original.in_proj_ba.weight.unflatten(0, (num_key_heads, -1)).split([by_head, by_head], 1)
        return Projection(torch.cat([part.flatten(0, 1) for part in (*rows, *gates)]).detach(), None)


class SeparateDeltaNet(GatedDeltaNet):
    """Each of its projections is a layer of its own."""

    def _into(self, original: Any) -> Projection:
        return merged([getattr(original, f"{part}_proj") for part in "qkvgba"])

    def _out(self, original: Any) -> Any:
        return original.o_proj

    def _norm(self, original: Any) -> Any:
        return original.o_norm


# transformers' mixers -> what takes their place.
MIXERS: dict[str, type[ShortConvolution | GatedDeltaNet]] = {
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
    "Qwen3NextGatedDeltaNet": InterleavedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": SeparateDeltaNet,
}
