"""Programmatic dependent launch: a kernel may start while the one before it on the stream still runs.

A kernel launched with `**programmatic_launch(tensor)` runs ahead until its `gdc_wait()`, which returns when every
earlier kernel has ended and its writes can be seen. Before it the kernel may only read what no kernel in flight
writes, such as weights, and may write nothing. Every program must call it: what comes after trusts that.
`gdc_launch_dependents()`, once every program has called it or ended, lets the next kernel start; where it is never
called, the end of the kernel does. Both belong under `if PDL:`, a constexpr that is False where this is missing: in
the interpreter and on GPUs before Hopper.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from model_states.kernels.dispatch import use_triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

__all__ = ["gdc_launch_dependents", "gdc_wait", "programmatic_launch"]


@cache
def _has_programmatic_launch(device: torch.device) -> bool:
    return gdc_wait is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def programmatic_launch(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel with a parameter PDL that works on `tensor`."""
    if use_triton(tensor) and _has_programmatic_launch(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
