"""The text encoder as an `Encoder` of cross-attention: token ids in, hidden states out, texts of any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model_states.components.content_key import content_key
from model_states.staged import HostToDevice

Ids = npt.NDArray[np.int64]


class TextEncoder:
    """transformers' encoder. An input has `encoder_input_ids`, a flat sequence of 1 to `max_positions` integers."""

    def __init__(self, module: Any, max_positions: int, vocab_size: int, device: torch.device) -> None:
        self.module = module
        self.max_positions, self._vocab_size = max_positions, vocab_size
        self._device = device
        self._transfer = HostToDevice(device)

    def content_key(self, model_inputs: Mapping[str, Any]) -> bytes:
        """See `Encoder.content_key`."""
        if set(model_inputs) != {"encoder_input_ids"}:
            given = ", ".join(map(repr, model_inputs)) or "nothing"
            raise ValueError(
                f"model_inputs has {given}; give {{'encoder_input_ids': token ids of the text to read}}"
            )
        ids = _as_ids(model_inputs["encoder_input_ids"])
        if not 0 < len(ids) <= self.max_positions:
            raise ValueError(
                f"encoder_input_ids has {len(ids)} ids, and this model reads 1 to {self.max_positions}; cut the text"
            )
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ValueError(
                f"encoder_input_ids has ids outside [0, {self._vocab_size}); use the model's tokenizer"
            )
        return content_key(ids)

    def num_positions(self, model_inputs: Mapping[str, Any]) -> int:
        """One for each token."""
        return len(model_inputs["encoder_input_ids"])

    def largest_inputs(self) -> Mapping[str, Any]:
        """A text of the greatest length."""
        return {"encoder_input_ids": np.ones(self.max_positions, np.int64)}

    def stage(self, inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """See `Encoder.stage`: int64 [n, 1 + longest length], the length of each text and then its ids."""
        texts = [_as_ids(item["encoder_input_ids"]) for item in inputs]
        rows = np.ones((len(texts), 1 + max(map(len, texts))), np.int64)
        for row, text in zip(rows, texts, strict=True):
            row[0], row[1 : 1 + len(text)] = len(text), text
        staged = torch.empty(rows.shape, dtype=torch.int64, device=self._device)
        self._transfer.copy(rows, staged.view(-1))
        return staged

    def forward(self, staged: torch.Tensor) -> torch.Tensor:
        """See `Encoder.forward`. Texts are padded to the longest, and no token sees padding."""
        lengths, input_ids = staged[:, :1], staged[:, 1:]
        longest = input_ids.shape[1]
        is_real = torch.arange(longest, device=self._device) < lengths
        # Of four dimensions, so that transformers takes it as it is: a mask of two makes the host look at its content.
        mask = is_real[:, None, None, :].expand(-1, 1, longest, -1)
        hidden_states: torch.Tensor = self.module(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return hidden_states


def _as_ids(values: Any) -> Ids:
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"encoder_input_ids is no flat sequence of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"encoder_input_ids must be a flat sequence of integers, not {array.dtype} of shape {list(array.shape)}"
        )
    return array.astype(np.int64)
