"""What a rewrite is held against: calls of the model's own modules, watched on random inputs, and how near is equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model_states.attention import AttentionSpec
from model_states.attention.torch_backend import write_cache_torch
from model_states.rewrites.rehearsal import rehearsed

# Relative error of a tensor as a whole: other orders of summation stay an order of magnitude below.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@torch.no_grad()
def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected| over the whole tensors; infinite for another shape or dtype, zeros and NaN."""
    error = math.inf
    if got.shape == expected.shape and got.dtype == expected.dtype:
        wide = expected.float()
        error = float((got.float() - wide).norm() / wide.norm())
    return rehearsed(math.inf if math.isnan(error) else error)


def close(got: torch.Tensor, expected: torch.Tensor, slack: float = 1.0) -> bool:
    """Whether two tensors are equal but for rounding in their dtype; zeros and NaN are equal to nothing.

    slack: how many times more than that of one operation the rounding may be.
    """
    return relative_error(got, expected) < slack * _TOLERANCE.get(got.dtype, 0.0)


def random_like(weight: torch.Tensor, *shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers of weight's dtype and device; the global random state stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(weight)


def tried(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What a module that may be of any kind makes of x; None where it takes something else, or gives it."""
    try:
        y = module(x)
    except Exception:  # whatever it wants, it is not what is looked for
        return None
    return y if isinstance(y, torch.Tensor) else None


def floats_of(module: nn.Module) -> list[float]:
    """Numbers that a module holds as attributes: an epsilon, a multiplier, which a config may write without a point."""
    return list(dict.fromkeys(float(value) for value in vars(module).values() if type(value) in (int, float)))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden states that went in, the first tensor of its arguments, as [num_tokens, size]."""
        values = (*self.args, *self.kwargs.values())
        x = next(value for value in values if isinstance(value, torch.Tensor))
        return x.reshape(-1, x.shape[-1])

    @property
    def result(self) -> torch.Tensor:
        """The hidden states that came out, [num_tokens, size]."""
        y: torch.Tensor = self.output if isinstance(self.output, torch.Tensor) else self.output[0]
        return y.reshape(-1, y.shape[-1])

    def repeat(self, hidden: torch.Tensor) -> None:
        """Call the module again with other hidden states [num_tokens, size] and everything else the same."""
        if self.args:
            self.module(hidden[None], *self.args[1:], **self.kwargs)
        else:
            self.module(**{**self.kwargs, "hidden_states": hidden[None]})


@contextmanager
def watched(modules: Iterable[nn.Module]) -> Iterator[list[Call]]:
    """The calls of `modules` within, in the order in which they returned."""
    calls: list[Call] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(module, args, kwargs, output))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class StandIn:
    """In place of a paged attention layer: keeps what it is handed, and answers with the same random numbers.

    It serves both ways of calling one: with keys and values, and with those in its cache already.
    """

    def __init__(self, spec: AttentionSpec, num_tokens: int, like: torch.Tensor) -> None:
        self.spec = spec
        shape = (2, num_tokens, spec.num_kv_heads)  # block 0 is the null block
        self.key_cache = like.new_zeros(*shape, spec.head_size)
        self.value_cache = like.new_zeros(*shape, spec.head_size_v)
        self.slot_mapping = torch.arange(num_tokens, 2 * num_tokens, device=like.device)
        self.out = random_like(like, num_tokens, spec.num_heads, spec.head_size_v, seed=1)
        self.query = self.out
        self.sinks: torch.Tensor | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `AttentionLayer.__call__`."""
        write_cache_torch(key, value, self.key_cache, self.value_cache, self.slot_mapping)
        return self.attend(query, sinks)

    def attend(self, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Like `AttentionLayer.attend`."""
        self.query, self.sinks = query.clone(), sinks
        return self.out

    @property
    def key(self) -> torch.Tensor:
        """[num_tokens, num_kv_heads, head_size]."""
        return self.key_cache[1]

    @property
    def value(self) -> torch.Tensor:
        """[num_tokens, num_kv_heads, head_size_v]."""
        return self.value_cache[1]

    def agrees_with(self, other: StandIn) -> bool:
        """Whether both were handed the same queries, keys and values."""
        return all(close(getattr(self, name), getattr(other, name)) for name in ("query", "key", "value"))
