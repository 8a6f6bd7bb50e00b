"""What is launched to wake a device is valid: an error in it would be passed over, and only cost time."""

from __future__ import annotations

import torch

from core_runner.loader import launch_first


def test_first_launches_are_valid() -> None:
    launch_first(torch.device("cpu"))
