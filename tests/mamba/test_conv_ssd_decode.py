"""`conv_ssd_decode`: one launch gives what a convolution and a scan give one after the other."""

from __future__ import annotations

import pytest
import torch
from mamba.step_cases import DECODE, make_pool, make_step
from model_states_mamba.kernels import conv_ssd_decode, ssd_decode, ssd_scan

from model_states.kernels.causal_conv import causal_conv_torch, causal_conv_triton

# The one launch, and the two in its stead.
OPS = [
    (conv_ssd_decode.conv_ssd_decode_torch, causal_conv_torch, ssd_scan.ssd_scan_torch),
    (conv_ssd_decode.conv_ssd_decode_triton, causal_conv_triton, ssd_scan.ssd_scan_triton),
]


@pytest.mark.parametrize("kind", ["plain", "gate", "norm"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "state", "width"), [(2, 1, 24, 12, 4), (4, 2, 32, 16, 2), (6, 3, 20, 9, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ops", OPS)
def test_one_launch_is_two(
    ops, dtype, heads, groups, size, state, width, bias, kind, device, monkeypatch
) -> None:
    monkeypatch.setattr(ssd_decode, "_PROGRAMS", 1)  # programs take several heads
    torch.manual_seed(9)
    both, convolve, scan = ops
    step = make_step(DECODE[1], DECODE[0], device)
    n, inner, by_group = len(step.token_rows), heads * size, groups * state
    projected = torch.randn(n, 2 * inner + 2 * by_group + heads, device=device).to(dtype)
    gate, mixed, dt = projected.split([inner, inner + 2 * by_group, heads], 1)
    weight = torch.randn(width, inner + 2 * by_group, device=device).to(dtype).T
    offset = torch.randn(len(weight), device=device).to(dtype) if bias else None
    weights = ssd_scan.SsdWeights(
        -torch.rand(heads, device=device) - 0.1,
        torch.randn(heads, device=device),
        torch.randn(heads, device=device),
        (0.01, 9.0),
    )
    pools = [
        make_pool((width - 1, len(weight)), dtype, device),
        make_pool((heads, size, state), dtype, device),
    ]
    arrived = torch.zeros(n, dtype=torch.int32, device=device)
    results = []
    for together in (False, True):
        conv_pool, pool = (p.clone() for p in pools)
        y = torch.full((n, heads, size), 7777.0, device=device).to(dtype)
        squares = torch.zeros(n, heads, 1, device=device)
        after = None
        if kind != "plain":
            norm = torch.linspace(0.5, 1.5, inner, device=device).to(dtype) if kind == "norm" else None
            after = ssd_scan.Gated(gate, norm, False, None if norm is None else squares)
        if together:
            conv = conv_ssd_decode.Convolution(mixed, weight, offset, conv_pool)
            both(conv, dt, groups, weights, pool, step, y, after, arrived)
        else:
            out = torch.empty_like(mixed, memory_format=torch.contiguous_format)
            convolve(mixed, weight, offset, True, conv_pool, step, out)
            x, b, c = out.split([inner, by_group, by_group], 1)
            parts = (
                x.unflatten(1, (heads, size)),
                dt,
                *(part.unflatten(1, (groups, state)) for part in (b, c)),
            )
            scan(*parts, weights, pool, step, y, after)
        results.append((conv_pool, pool, y, squares))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want)
    assert not arrived.any()


def test_many_rows_of_many_programs(device) -> None:
    """Every row's states wait for its own convolution, however many rows there are; and again from where that left."""
    torch.manual_seed(10)
    heads, size, state, num_rows = 2, 16, 16, 24 if device.type == "cpu" else 56
    step = make_step([(j % 3 * 16, 1, False) for j in range(num_rows)], 16, device, max_blocks=3)
    n, inner = len(step.token_rows), heads * size
    mixed = torch.randn(n, inner + 2 * state, device=device)
    weights = ssd_scan.SsdWeights(*torch.rand(3, heads, device=device).sub(1).unbind(), (0.0, 9.0))
    weight, dt = torch.randn(inner + 2 * state, 4, device=device), torch.randn(n, heads, device=device)
    pools = [
        make_pool((3, len(weight)), torch.float32, device),
        make_pool((heads, size, state), torch.float32, device),
    ]
    arrived, results = torch.zeros(n, dtype=torch.int32, device=device), []
    for op in (conv_ssd_decode.conv_ssd_decode_torch, conv_ssd_decode.conv_ssd_decode):
        conv_pool, pool = (p.clone() for p in pools)
        ys = torch.zeros(2, n, heads, size, device=device)
        for y in ys:
            conv = conv_ssd_decode.Convolution(mixed, weight, None, conv_pool)
            op(conv, dt, 1, weights, pool, step, y, None, arrived)
        results.append((ys[:, :num_rows], pool, conv_pool))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not arrived.any()
