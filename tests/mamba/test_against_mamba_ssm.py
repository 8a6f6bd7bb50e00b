"""Where mamba-ssm's Triton operations and ours both apply, they agree. Skipped where it is not installed.

Its package does not import without its CUDA extension, for which an empty module stands in; its kernels do. Its chunk
scan takes one state for each row of a rectangle, and packed rows from none; its single step knows no limits of a time
step. The scan of Mamba-1 has no Triton operation there, but a plain reference.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from mamba.step_cases import DECODE, make_pool, make_step
from model_states_mamba.kernels.selective_scan import SelectiveInputs, SelectiveWeights, selective_scan_triton
from model_states_mamba.kernels.ssd_scan import Gated, SsdWeights, ssd_scan_triton
from support.peer_kernels import distance, hold_to_one_configuration, need_no_gpu, rounding, token_dtype

HEADS, SIZE, STATE = 4, 16, 16
NO_LIMITS = (0.0, float("inf"))
# (tokens computed, tokens of the step, whether it holds drafts) of each row; more than one are cold for mamba-ssm.
ROWS = {
    "cold": [(0, 50, False)],
    "warm": [(64, 50, False)],
    "packed": [(0, 37, False), (0, 1, False), (0, 16, False), (0, 40, False)],
}
DTYPES = ["float32", "bfloat16"]


@pytest.fixture
def mamba_ssm(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> types.SimpleNamespace:
    """Its operations."""
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", types.ModuleType("selective_scan_cuda"))
    pytest.importorskip("mamba_ssm")
    from mamba_ssm.ops.selective_scan_interface import selective_scan_ref
    from mamba_ssm.ops.triton import selective_state_update as update
    from mamba_ssm.ops.triton import ssd_combined as combined

    hold_to_one_configuration(monkeypatch, "mamba_ssm")
    if device.type == "cpu":
        need_no_gpu(monkeypatch)
    return types.SimpleNamespace(
        scan=combined.mamba_chunk_scan_combined,
        update=update.selective_state_update,
        selective_scan=selective_scan_ref,
    )


class Tokens(NamedTuple):
    """Of Mamba-2: x, z [num_tokens, H, P], dt [num_tokens, H], b, c [num_tokens, G, N]."""

    x: torch.Tensor
    dt: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    z: torch.Tensor


def tokens_of(num_tokens: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tokens:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, device=device).to(dtype)

    by_head, by_group = (HEADS, SIZE), (groups, STATE)
    return Tokens(noise(*by_head), noise(HEADS), noise(*by_group), noise(*by_group), noise(*by_head))


def weights_of(limits: tuple[float, float], device: torch.device) -> SsdWeights:
    rate = -torch.rand(HEADS, device=device) - 0.1
    return SsdWeights(rate, torch.randn(HEADS, device=device), torch.randn(HEADS, device=device) - 1, limits)


def ours(tokens: Tokens, weights: SsdWeights, pool: torch.Tensor, step, gated: bool) -> torch.Tensor:
    """y of every token, padding included."""
    y = torch.zeros_like(tokens.x)
    after = Gated(tokens.z.flatten(1), None, False, None) if gated else None
    ssd_scan_triton(tokens.x, tokens.dt, tokens.b, tokens.c, weights, pool, step, y, after)
    return y


def packing(step, num_rows: int) -> dict[str, Any]:
    """What mamba-ssm takes to tell rows apart and to hand out the state of each."""
    starts = step.query_start_loc[: num_rows + 1]
    rows = step.token_rows[None, : int(starts[-1])].contiguous()
    return {"seq_idx": rows, "cu_seqlens": starts, "return_varlen_states": True}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("limits", [NO_LIMITS, (0.1, 0.7)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ROWS)
def test_chunk_scan(kind, groups, dtype, limits, gated, mamba_ssm, device) -> None:
    torch.manual_seed(groups)
    rows, dtype = ROWS[kind], token_dtype(dtype, device)
    step = make_step(rows, 64, device)
    tokens, weights = tokens_of(len(step.token_rows), groups, dtype, device), weights_of(limits, device)
    pool = make_pool((HEADS, SIZE, STATE), torch.float32, device)
    before = pool[step.source_rows[:1]]
    y = ours(tokens, weights, pool, step, gated)
    real = Tokens(*(part[None, : -(len(y) - sum(count for _, count, _ in rows))] for part in tokens))
    options = packing(step, len(rows)) if len(rows) > 1 else {"initial_states": before}
    want, *states = mamba_ssm.scan(
        *real[:2],
        weights.a,
        *real[2:4],
        chunk_size=16,
        D=weights.d,
        z=real.z if gated else None,
        dt_bias=weights.dt_bias,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
        **options,
    )
    # Packed rows have their states in the last of what is returned.
    compare(step, y, pool, want[0], states[-1], rounding(dtype, tensor_cores=device.type == "cuda"))


def compare(step, y, pool, want_y, want_states, most: float) -> None:
    """Rows one by one, so that none hides behind the others."""
    starts = step.query_start_loc.tolist()
    for row, state in enumerate(want_states):
        tokens = slice(starts[row], starts[row + 1])
        assert distance(y[tokens], want_y[tokens]) < most
        assert distance(pool[step.final_rows[row]], state) < most


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2])
def test_one_step(groups, dtype, gated, mamba_ssm, device) -> None:
    torch.manual_seed(groups)
    dtype, (block_size, rows) = token_dtype(dtype, device), DECODE
    step, n = make_step(rows, block_size, device), len(rows)
    assert step.is_decode
    tokens, weights = tokens_of(len(step.token_rows), groups, dtype, device), weights_of(NO_LIMITS, device)
    pool = make_pool((HEADS, SIZE, STATE), torch.float32, device)
    states = pool[step.source_rows[:n]]
    y = ours(tokens, weights, pool, step, gated)
    real = Tokens(*(part[:n] for part in tokens))
    want = mamba_ssm.update(
        states,
        real.x,
        real.dt[..., None].expand(n, HEADS, SIZE),
        weights.a[:, None, None].expand(HEADS, SIZE, STATE),
        real.b,
        real.c,
        weights.d[:, None].expand(HEADS, SIZE),
        z=real.z if gated else None,
        dt_bias=weights.dt_bias[:, None].expand(HEADS, SIZE),
        dt_softplus=True,
    )
    compare(step, y, pool, want, states, rounding(dtype, tensor_cores=False))


def selective_case(step, dtype: torch.dtype) -> tuple[SelectiveInputs, SelectiveWeights]:
    """Of Mamba-1, for every token of a step."""
    device, size = step.token_rows.device, HEADS * SIZE
    widths = [size, size, size, STATE, STATE]
    wide = torch.randn(len(step.token_rows), sum(widths), device=device).to(dtype)
    rate = -torch.rand(size, STATE, device=device) - 0.1
    weights = SelectiveWeights(rate, torch.randn(size, device=device), torch.randn(size, device=device) - 1)
    return SelectiveInputs(*wide.split(widths, 1)), weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_step_of_mamba_1(dtype, mamba_ssm, device) -> None:
    torch.manual_seed(3)
    dtype, (block_size, rows) = token_dtype(dtype, device), DECODE
    step, n = make_step(rows, block_size, device), len(rows)
    inputs, weights = selective_case(step, dtype)
    pool = make_pool((HEADS * SIZE, STATE), torch.float32, device)
    states, y = pool[step.source_rows[:n]], torch.zeros_like(inputs.x).contiguous()
    selective_scan_triton(inputs, weights, pool, step, y)
    x, dt, gate, b, c = (part[:n] for part in inputs)
    want = mamba_ssm.update(
        states, x, dt, weights.a, b, c, weights.skip, z=gate, dt_bias=weights.dt_bias, dt_softplus=True
    )
    compare(step, y, pool, want, states, rounding(dtype, tensor_cores=False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scan_of_mamba_1(dtype, mamba_ssm, device) -> None:
    torch.manual_seed(4)
    rows, dtype = ROWS["packed"], token_dtype(dtype, device)
    step = make_step(rows, 64, device)
    inputs, weights = selective_case(step, dtype)
    pool = make_pool((HEADS * SIZE, STATE), torch.float32, device)
    y = torch.zeros_like(inputs.x).contiguous()
    selective_scan_triton(inputs, weights, pool, step, y)
    found = list(_reference(mamba_ssm.selective_scan, inputs, weights, [count for _, count, _ in rows]))
    want, states = (torch.cat(parts) for parts in zip(*found, strict=True))
    compare(step, y, pool, want, states, rounding(dtype, tensor_cores=False))


def _reference(scan, inputs, weights, counts: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """y and the last state of each row, which mamba-ssm wants with its tokens last."""
    start = 0
    for count in counts:
        x, dt, gate, b, c = (part[start : start + count].T[None] for part in inputs)
        start += count
        y, state = scan(
            *(x, dt, weights.a, b, c, weights.skip, gate, weights.dt_bias),
            delta_softplus=True,
            return_last_state=True,
        )
        yield y[0].T, state
