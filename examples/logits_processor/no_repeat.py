"""A logits processor: no id comes again among the `window` tokens before it, prompt included.

    python examples/logits_processor/no_repeat.py

A request asks for it with `SamplingParams(logits_processors={"no_repeat": {"window": 8}})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from model_states import Component, LogitsProcessor, LogitsRows, ModelConfig, RequestView, hookimpl
from model_states.staged import StagedTensor

MAX_WINDOW = 64


class NoRepeat(LogitsProcessor):
    """Keeps the last tokens of every slot in a ring on the device, where the newest one is known first."""

    name: ClassVar[str] = "no_repeat"

    def __init__(self, config: ModelConfig) -> None:
        rows, device = config.max_num_reqs + 1, config.device
        # A draft that is not accepted leaves its token behind, in a place that is not looked at again before it is
        # written again: hence as many places more as there are drafts.
        self._size = MAX_WINDOW + config.num_draft_tokens
        self._ring = StagedTensor((rows, self._size), torch.int32, device)
        self._window = StagedTensor((rows,), torch.int32, device)
        self._ages = torch.arange(1, MAX_WINDOW + 1, device=device)

    def validate(self, options: Mapping[str, Any]) -> None:
        """Options: window, an integer in [1, MAX_WINDOW]."""
        window = options.get("window")
        if set(options) != {"window"} or type(window) is not int or not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"give one option, window, an integer in [1, {MAX_WINDOW}]")

    def add_request(self, slot: int, request: RequestView, options: Mapping[str, Any]) -> None:
        """After a preemption the tokens to prefill hold the output so far, so a resume is no special case."""
        tokens = np.asarray(request.prefill_token_ids, dtype=np.int32)
        positions = np.arange(max(len(tokens) - self._size, 0), len(tokens))
        row = np.zeros(self._size, dtype=np.int32)
        row[positions % self._size] = tokens[positions]
        self._ring.stage(slot, 0, row)
        self._window.stage(slot, 0, options["window"])

    def apply_staged_writes(self) -> None:
        """One copy and one kernel for all new requests."""
        self._ring.apply()
        self._window.apply()

    def process(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Note each row's last token, then forbid those of its window."""
        ring, slots, positions = self._ring.tensor, rows.slots[:, None], rows.positions[:, None]
        last = rows.last_token_ids.to(torch.int32)[:, None]
        ring[slots, (positions - 1) % self._size] = last
        counts = self._ages <= torch.minimum(self._window.tensor[slots], positions)
        recent = torch.where(counts, ring[slots, (positions - self._ages) % self._size], last)
        logits.scatter_(1, recent.to(torch.int64), -torch.inf)


class NoRepeatExtension(Component):
    """What `LLM(extensions=[...])` takes; a model state may implement the same hook."""

    @hookimpl
    def logits_processors(self, config: ModelConfig) -> list[LogitsProcessor]:
        """Called once, when the model is loaded."""
        return [NoRepeat(config)]


def main() -> None:
    """Complete one prompt with the embedded model, without the processor and with it."""
    from core_runner import LLM, SamplingParams

    llm = LLM(extensions=[NoRepeatExtension()])
    for asked in ({}, {"no_repeat": {"window": 16}}):
        params = SamplingParams(temperature=0.0, max_tokens=40, logits_processors=asked)
        print(f"{asked}: {llm.generate('The cat', params)[0].outputs[0].text!r}")


if __name__ == "__main__":
    main()
