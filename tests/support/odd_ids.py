"""A grammar without a library: what `Engine.grammars` may be where llguidance is not installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from core_runner import SamplingParams, SchedulerOutput
from core_runner.scheduling.output import GrammarBitmask
from core_runner.scheduling.step import ScheduledStep


class OddIds:
    """Grammars and constraint in one: whoever asks for any structured output samples odd ids alone."""

    error: str | None = None

    def __init__(self, vocab_size: int) -> None:
        # Bit k of word w is id 32 w + k.
        self._words = np.full(-(-vocab_size // 32), 0xAAAAAAAA, np.uint32).view(np.int32)

    def check(self, params: SamplingParams) -> None:
        """Any form will do."""

    def constrain(self, structured: Any) -> OddIds:
        return self

    def is_ready(self) -> bool:
        return True

    def accept(self, token_ids: Sequence[int]) -> bool:
        return all(token % 2 for token in token_ids)

    def add_bitmask(self, step: ScheduledStep) -> SchedulerOutput:
        num_masks = len(step.constrained)
        bitmask = GrammarBitmask(
            slots=step.output.slots[step.constrained],
            positions=np.zeros(num_masks, np.int32),
            words=partial(np.tile, self._words, (num_masks, 1)),
        )
        return replace(step.output, grammar_bitmask=bitmask)
