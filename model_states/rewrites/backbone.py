"""A whole decoder as a plain loop over fused layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from model_states.kernels.linear import MAX_ROWS
from model_states.rewrites.attention import RotaryStyle, Tables, position_tables
from model_states.rewrites.layers import Boundary, FusedLayer
from model_states.rewrites.seen import Call, close

_ROWS = 1 << 16  # of a table that are computed at once


@dataclass(slots=True)
class FusedBackbone:
    """Embedding, layers, and the norm at the end."""

    embedding: nn.Module
    embedding_multiplier: float
    layers: Sequence[FusedLayer]
    end: Boundary
    plain: bool = field(init=False)  # whether `few_rows` says all that the layers do

    def __post_init__(self) -> None:
        self.plain = self.end.plain and all(layer.plain for layer in self.layers)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens, hidden] of int64 input_ids and positions [num_tokens]."""
        few = self.plain and input_ids.shape[0] <= MAX_ROWS
        return (self.few_rows if few else self.many_rows)(self.embed(input_ids), positions)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer, [num_tokens, hidden]."""
        embedded: torch.Tensor = self.embedding(input_ids)
        return embedded if self.embedding_multiplier == 1.0 else embedded * self.embedding_multiplier

    def many_rows(self, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states of an embedded step; residual is overwritten."""
        x = None
        for layer in self.layers:
            x = layer(x, residual, positions)
        return self.end(x, residual)

    def few_rows(self, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same where all layers are `plain`."""
        after = [*(layer.into_attention for layer in self.layers[1:]), self.end]
        for layer, boundary in zip(self.layers, after, strict=True):
            residual = layer.few_rows(residual, positions, boundary.multiplier)
        return self.end(None, residual)


class PositionTables:
    """The rotary tables of every position, computed once by the model's own rotary modules."""

    def __init__(self, rotary_calls: Sequence[Call], positions: torch.Tensor, max_model_len: int) -> None:
        self._calls = rotary_calls
        self._positions = positions
        self._max_model_len = max_model_len
        self._tables: dict[tuple[int, RotaryStyle], Tables] = {}

    def of(self, kwargs: dict[str, Any], style: RotaryStyle) -> Tables | None:
        """Tables [max_model_len, rotary_dim / 2] for the layer that was called with these keywords."""
        given = kwargs.get("position_embeddings")
        index = next((i for i, call in enumerate(self._calls) if call.output is given), None)
        if index is None:
            return None
        if (index, style) not in self._tables:
            self._tables[index, style] = self._compute(self._calls[index], style)
        tables, expected = self._tables[index, style], position_tables(kwargs)
        if expected is None:
            return None
        halves = style.tables(*expected)
        same = all(close(t[self._positions], half) for t, half in zip(tables, halves, strict=True))
        return tables if same else None

    def _compute(self, call: Call, style: RotaryStyle) -> Tables:
        pieces = []
        for start in range(0, self._max_model_len, _ROWS):
            rows = torch.arange(
                start, min(start + _ROWS, self._max_model_len), device=self._positions.device
            )[None]
            args = tuple(self._replaced(value, rows) for value in call.args)
            kwargs = {name: self._replaced(value, rows) for name, value in call.kwargs.items()}
            whole = position_tables({"position_embeddings": call.module(*args, **kwargs)})
            assert whole is not None, "a rotary module gave two tensors before"
            pieces.append([table.clone() for table in style.tables(*whole)])
        cos, sin = zip(*pieces, strict=True)
        return torch.cat(cos), torch.cat(sin)

    def _replaced(self, value: Any, rows: torch.Tensor) -> Any:
        """rows where the step's positions were handed in, anything else as it is.

        A model of several kinds of positions hands in as many copies where there is text alone.
        """
        own = self._positions
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.shape[-1:] != own.shape:
            return value
        same = bool((value == own).all())
        return rows[0].expand(*value.shape[:-1], rows.shape[-1]) if same else value
