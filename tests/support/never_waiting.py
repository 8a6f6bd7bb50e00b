"""Steps on a GPU that raise where torch would wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from core_runner import ModelRunner


@dataclass
class Counted:
    """Steps that had rows, and those that had a grammar's mask."""

    steps: int = 0
    masks: int = 0


@contextmanager
def never_waiting(runner: ModelRunner) -> Iterator[Counted]:
    """While entered, a step of the runner is an error if it makes the host wait; reading its output is none."""
    counted = Counted()
    execute_model, sample_tokens = strict(runner.execute_model), strict(runner.sample_tokens)

    def counting(step: Any) -> None:
        counted.steps += step.num_reqs > 0
        counted.masks += step.grammar_bitmask is not None
        execute_model(step)

    with (
        patch.object(runner, "execute_model", counting),
        patch.object(runner, "sample_tokens", sample_tokens),
    ):
        yield counted


def strict(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in torch's debug mode for synchronising calls."""

    def call(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call
