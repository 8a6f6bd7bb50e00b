"""Kernels that forked processes have compiled serve this process, beside the device that it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_states.kernels.compile_ahead import compiling_ahead
from model_states.kernels.linear import linear_torch, linear_triton

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 4, 8, 16)


def test_forked_processes_compile_what_is_launched_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    from model_states.kernels import linear

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    linear._linear_kernel.device_caches.clear()
    weight = torch.randn(640, 512, device="cuda", dtype=torch.bfloat16)
    inputs = [torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in ROWS]
    with compiling_ahead() as compiler:
        for x in inputs:
            linear_triton(x, weight)
    assert compiler.is_cold
    misses: list[bool] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: misses.append(not cache_hit)
    )
    for x in inputs:
        torch.testing.assert_close(linear_triton(x, weight), linear_torch(x, weight), rtol=2e-2, atol=2e-1)
    assert not any(misses)
    assert len(list(tmp_path.rglob("*.cubin"))) >= len(ROWS)
