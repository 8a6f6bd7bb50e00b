"""`Mixer`: a layer that keeps a state of fixed size in pools, in the place of a module whose weights it shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from model_states.cache import CacheTensor
from model_states.components.recurrent_state import RecurrentLayer
from model_states.config import ModelConfig
from model_states.errors import UnsupportedModelError
from model_states.kernels.causal_conv import causal_conv
from model_states.kernels.rope_write import Rotary
from model_states.rewrites.products import Projection, Rows


class Mixer(nn.Module, ABC):
    """A product, a causal convolution and what follows it, and a product.

    qkv, out: the products, by the names that an attention has for its own, so that a fused layer takes either. layer:
    its state, once it is attached. in_multiplier: of what goes in. stand_in: what it answers where there is no step.
    """

    layer: RecurrentLayer

    def __init__(
        self, conv: Any, qkv: Projection, out: Projection, in_multiplier: float | None = None
    ) -> None:
        """conv: torch's depthwise convolution."""
        super().__init__()
        # Stored tap by tap, since kernels take channels beside each other.
        self.conv_weight: torch.Tensor = conv.weight.detach().squeeze(1).T.contiguous().T
        self.conv_bias: torch.Tensor | None = conv.bias
        self.qkv, self.out = qkv, out
        self.in_multiplier = in_multiplier
        self.stand_in: torch.Tensor | None = None

    def state_tensors(self, config: ModelConfig) -> dict[str, CacheTensor]:
        """Shapes and dtypes of one request's state in this layer: the inputs that the convolution keeps."""
        size, width = self.conv_weight.shape
        return {"conv": CacheTensor((width - 1, size), config.dtype)}

    def attach(self, layer: RecurrentLayer, config: ModelConfig) -> None:
        """Take the state of `layer`, and make what a step needs beside it."""
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """hidden_states [1, num_tokens, hidden] of the step's flat tokens; the same shape out."""
        return (self.mix(hidden_states[0]) if self.stand_in is None else self.stand_in)[None]

    def mix(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] to [num_tokens, hidden]."""
        if self.in_multiplier is not None:
            hidden_states = hidden_states * self.in_multiplier
        attended = self.attend(self.qkv(hidden_states), None)
        return self.out(attended if isinstance(attended, torch.Tensor) else attended.normed())

    def rotary(self, positions: torch.Tensor) -> None:
        """A mixer knows the order of its tokens without."""

    @abstractmethod
    def attend(self, qkv: torch.Tensor, rotary: Rotary | None) -> Rows:
        """From the projected tokens to what the last product takes, [num_tokens, ..]."""

    def _convolve(self, x: torch.Tensor, silu: bool) -> torch.Tensor:
        out = x.new_empty(x.shape)
        pool, step = self.layer.tensors["conv"], self.layer.step
        causal_conv(x, self.conv_weight, self.conv_bias, silu, pool, step, out)
        return out


_M = TypeVar("_M", bound=Mixer)


def replace_mixers(model: nn.Module, kinds: Mapping[str, Callable[[Any], _M]]) -> list[_M]:
    """Put ours in the place of every module whose class `kinds` names, and give them in the order of the layers."""
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in kinds]
    mixers: list[_M] = []
    for name, module in found:
        mixer = kinds[type(module).__name__](module)
        model.set_submodule(name, mixer)
        mixers.append(mixer)
    return mixers


def check_silu(original: Any) -> None:
    """Raise `UnsupportedModelError` for a module whose convolution is followed by anything but SiLU."""
    if original.activation not in ("silu", "swish"):
        name = type(original).__name__
        raise UnsupportedModelError(f"{name} has the activation {original.activation!r}; silu is supported")
