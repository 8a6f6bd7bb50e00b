"""`triton` and `tl`, or stand-ins that let a kernel file be imported where Triton is not installed.

A stand-in is never launched: `use_triton` is False there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # not Linux, or installed without it
    triton: Any = SimpleNamespace(  # type: ignore[no-redef]
        jit=lambda fn=None, **_: fn if fn is not None else (lambda kernel: kernel),
        cdiv=lambda a, b: -(-a // b),
    )
    tl: Any = SimpleNamespace(constexpr=int)  # type: ignore[no-redef]

__all__ = ["tl", "triton"]
