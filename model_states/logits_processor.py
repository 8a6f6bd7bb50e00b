"""The logits-processor protocol: a plugin's code that changes the logits of the requests that ask for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from model_states.batch import RequestView


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Whose the rows of logits are that a processor is given; rows of one slot come in order of position."""

    slots: torch.Tensor  # int64 [n]
    positions: torch.Tensor  # of the id that will be sampled, int64 [n]
    last_token_ids: torch.Tensor  # the token at positions - 1, int64 [n]


class LogitsProcessor(ABC):
    """Changes logits by the options that a request gives under the processor's name.

    What it keeps, it keeps by slot in tensors of R + 1 rows, and changes there for all rows at once. It runs after
    the core's masks, bias and penalties and before temperature. It waits for nothing on the device, and what it
    does to a row depends on that row's slot, position and tokens alone: then streams stay the same in any batch.
    """

    name: ClassVar[str]  # the key in `SamplingParams.logits_processors`

    @abstractmethod
    def validate(self, options: Mapping[str, Any]) -> None:
        """Raise `ValueError`, saying what is wrong and how to fix it, for options that cannot be served.

        Called before the request is admitted; must change nothing.
        """

    @abstractmethod
    def add_request(self, slot: int, request: RequestView, options: Mapping[str, Any]) -> None:
        """Write every field of `slot` for a request that asks for this processor.

        Called at each admission; a request that comes back after preemption has its output so far in
        `request.prefill_token_ids`. Stage writes here and send them in `apply_staged_writes`.
        """

    def remove_request(self, slot: int) -> None:  # noqa: B027 - most processors have nothing to give back
        """Let go of a slot that was added; it may be added again in the same step."""

    def apply_staged_writes(self) -> None:  # noqa: B027 - a processor without a state has nothing to send
        """Send what was staged to the device. Called in each step that added a request; never waits for the device."""

    @abstractmethod
    def process(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Change logits float32 [n, vocab_size] in place: the rows that ask and no others, n >= 1.

        Not called in a step in which no row asks. -inf forbids an id; a row left with no id, or with NaN, ends its
        request with an error and no other.
        """
