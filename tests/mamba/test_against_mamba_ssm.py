"""Where mamba-ssm's Triton operations and ours both apply, they agree. Skipped where it is not installed.

Its package does not import without its CUDA extension, for which an empty module stands in; its kernels do. Under
Triton's interpreter its autotuner must be held to one configuration.
"""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import torch
from mamba.step_cases import make_pool, make_step
from model_states_mamba.kernels.ssd_scan import SsdWeights, ssd_scan

HEADS, GROUPS, SIZE, STATE = 4, 1, 16, 16


@pytest.fixture
def mamba_ssm(monkeypatch: pytest.MonkeyPatch, device: torch.device):
    """Its two operations."""
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", types.ModuleType("selective_scan_cuda"))
    pytest.importorskip("mamba_ssm")
    from mamba_ssm.ops.triton import selective_state_update as update
    from mamba_ssm.ops.triton import ssd_combined as combined

    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        for name in ("bmm", "chunk_scan", "chunk_state", "state_passing"):
            module = sys.modules[f"mamba_ssm.ops.triton.ssd_{name}"]
            for tuner in vars(module).values():
                if hasattr(tuner, "configs"):
                    monkeypatch.setattr(tuner, "configs", tuner.configs[:1])
    return combined.mamba_chunk_scan_combined, update.selective_state_update


def _inputs(num_tokens: int, device: torch.device):
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, HEADS, SIZE, device=device)
    b, c = torch.randn(2, num_tokens, GROUPS, STATE, device=device)
    dt = torch.randn(num_tokens, HEADS, device=device)
    weights = SsdWeights(
        -torch.rand(HEADS, device=device) - 0.1,
        torch.randn(HEADS, device=device),
        torch.randn(HEADS, device=device) - 1,
        (0.0, float("inf")),
    )
    return x, dt, b, c, weights


def _ours(x, dt, b, c, weights, pool, num_computed: int):
    step = make_step([(num_computed, len(x), False)], 64, x.device)
    y = torch.zeros(len(step.token_rows), HEADS, SIZE, device=x.device)
    padding = [torch.cat([part, part[:1], part[:1]]) for part in (x, dt, b, c)]
    ssd_scan(*padding, weights, pool, step, y)
    return y[: len(x)], int(step.source_rows[0]), int(step.final_rows[0])


@pytest.mark.parametrize("num_computed", [0, 64])
def test_chunk_scan(num_computed: int, mamba_ssm, device) -> None:
    scan, _ = mamba_ssm
    x, dt, b, c, weights = _inputs(50, device)
    pool = make_pool((HEADS, SIZE, STATE), torch.float32, device)
    before = pool.clone()
    y, source, final = _ours(x, dt, b, c, weights, pool, num_computed)
    want, state = scan(
        x[None],
        dt[None],
        weights.a,
        b[None],
        c[None],
        chunk_size=16,
        D=weights.d,
        dt_bias=weights.dt_bias,
        initial_states=before[source][None],
        dt_softplus=True,
        return_final_states=True,
    )
    torch.testing.assert_close(y, want[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pool[final], state[0], rtol=1e-3, atol=1e-3)


def test_one_step(mamba_ssm, device) -> None:
    _, update = mamba_ssm
    x, dt, b, c, weights = _inputs(1, device)
    pool = make_pool((HEADS, SIZE, STATE), torch.float32, device)
    state = pool[1][None].clone()
    y, source, final = _ours(x, dt, b, c, weights, pool, 9)
    assert (source, final) == (1, 1)
    wide = (HEADS, SIZE, STATE)
    want = update(
        state,
        x,
        dt[..., None].expand(1, HEADS, SIZE),
        weights.a[:, None, None].expand(wide),
        b,
        c,
        weights.d[:, None].expand(HEADS, SIZE),
        dt_bias=weights.dt_bias[:, None].expand(HEADS, SIZE),
        dt_softplus=True,
    )
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool[final], state[0], rtol=1e-4, atol=1e-4)
