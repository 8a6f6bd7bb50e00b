"""Scans: twins and Triton equal the plain recurrence, token by token, for rows of every kind, states included."""

from __future__ import annotations

import random

import pytest
import torch
from mamba.step_cases import DECODE, MIXED, expected_states, make_pool, make_step
from model_states_mamba.kernels import selective_scan, ssd_decode, ssd_scan
from torch.nn import functional

from model_states.kernels import state_chunks

CASES = [*MIXED, DECODE]


class Recurrence:
    """Runs a recurrence over ranges of tokens, each range once. step(state, token) -> (state, y)."""

    def __init__(self, pool: torch.Tensor, advance) -> None:
        self.pool, self.advance, self.known = pool.float(), advance, {}

    def __call__(self, source: int, tokens: range) -> tuple[torch.Tensor, torch.Tensor | None]:
        key = (source, tokens.start, tokens.stop)
        if not len(tokens):
            return self.pool[source], None
        if key not in self.known:
            state, _ = self(source, tokens[:-1])
            self.known[key] = self.advance(state, tokens[-1])
        return self.known[key]


def check(recurrence: Recurrence, step, pool, before, y, tolerance) -> None:
    starts = step.query_start_loc.tolist()
    for b in range(len(starts) - 1):
        for token in range(starts[b], starts[b + 1]):
            want = recurrence(int(step.source_rows[b]), range(starts[b], token + 1))[1]
            torch.testing.assert_close(y[token].float(), want, **tolerance)
    want_pool = before.clone()
    for row, state in expected_states(step, lambda *args: recurrence(*args)[0]).items():
        assert row > 0
        want_pool[row] = state.to(before.dtype)
    torch.testing.assert_close(pool, want_pool, **tolerance)
    untouched = (pool == before).flatten(1).all(1)
    assert untouched[0]
    assert int((~untouched).sum()) == len(expected_states(step, lambda *args: pool[0]))


@pytest.mark.parametrize("dt_limits", [(0.0, float("inf")), (0.1, 0.7)])
@pytest.mark.parametrize(("block_size", "rows"), CASES)
@pytest.mark.parametrize("op", [ssd_scan.ssd_scan_torch, ssd_scan.ssd_scan_triton])
def test_ssd_scan(op, block_size, rows, dt_limits, device) -> None:
    torch.manual_seed(4)
    heads, groups, size, state = 4, 2, 8, 12
    step = make_step(rows, block_size, device)
    n = len(step.token_rows)
    wide = torch.randn(n, heads * size + 2 * groups * state + heads, device=device)
    x, b, c, dt = wide.split([heads * size, groups * state, groups * state, heads], 1)
    x, b, c = x.unflatten(1, (heads, size)), b.unflatten(1, (groups, state)), c.unflatten(1, (groups, state))
    weights = ssd_scan.SsdWeights(
        -torch.rand(heads, device=device) - 0.1,
        torch.randn(heads, device=device),
        torch.randn(heads, device=device) - 1,
        dt_limits,
    )
    pool = make_pool((heads, size, state), torch.float32, device)
    before, y = pool.clone(), torch.full((n, heads, size), 7777.0, device=device)
    op(x, dt, b, c, weights, pool, step, y)
    seconds = functional.softplus(dt + weights.dt_bias).clamp(*dt_limits)
    group = torch.arange(heads, device=device) // (heads // groups)

    def advance(h: torch.Tensor, t: int):
        s = seconds[t][:, None]
        h = (s * weights.a[:, None]).exp()[..., None] * h + (s * x[t])[..., None] * b[t][group][:, None]
        return h, (h * c[t][group][:, None]).sum(-1) + weights.d[:, None] * x[t]

    check(Recurrence(before, advance), step, pool, before, y, {"rtol": 1e-4, "atol": 1e-4})


@pytest.mark.parametrize("kind", ["gate", "norm", "norm, gate last"])
@pytest.mark.parametrize(("block_size", "rows"), [MIXED[0], DECODE])
@pytest.mark.parametrize("size", [24, 80])
@pytest.mark.parametrize("op", [ssd_scan.ssd_scan_torch, ssd_scan.ssd_scan_triton])
def test_gate_and_sums_of_squares_in_passing(op, size, block_size, rows, kind, device, monkeypatch) -> None:
    monkeypatch.setattr(ssd_decode, "_PROGRAMS", 1)  # programs take both heads at once
    torch.manual_seed(7)
    heads, state = 2, 12
    step = make_step(rows, block_size, device)
    n, num_real = len(step.token_rows), sum(count for _, count, _ in rows)
    x, b, c = (torch.randn(n, h, w, device=device) for h, w in ((heads, size), (1, state), (1, state)))
    dt, wide = torch.randn(n, heads, device=device), torch.randn(n, heads * size + 5, device=device)
    weights = ssd_scan.SsdWeights(
        -torch.rand(heads, device=device),
        torch.ones(heads, device=device),
        torch.zeros(heads, device=device),
        (0, 9e9),
    )
    gate, last = wide[:, 2:-3], kind == "norm, gate last"
    norm = None if kind == "gate" else torch.randn(heads * size, device=device)
    squares = torch.full((n, heads, ssd_scan.num_pieces(size)), 7777.0, device=device)
    after = ssd_scan.Gated(gate, norm, last, None if norm is None else squares)
    pool = make_pool((heads, size, state), torch.float32, device)
    pools, results = [pool.clone(), pool.clone()], torch.zeros(2, n, heads, size, device=device)
    op(x, dt, b, c, weights, pools[0], step, results[0])
    op(x, dt, b, c, weights, pools[1], step, results[1], after)
    torch.testing.assert_close(pools[1], pools[0], rtol=0, atol=0)
    plain, got = results[:, :num_real].flatten(2)
    factor = functional.silu(gate[:num_real])
    want = plain * factor * (1 if norm is None else norm)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if norm is not None:
        squared = (plain if last else plain * factor).square().view(num_real, heads, size)
        parts = torch.stack([part.sum(-1) for part in squared.split(64, -1)], -1)
        torch.testing.assert_close(squares[:num_real], parts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", [ssd_scan.ssd_scan_torch, ssd_scan.ssd_scan_triton])
def test_strong_decays_round_nothing_that_stays(op, device) -> None:
    """Where nothing of a token reaches the next one, y is what each token gives to itself, whatever has decayed."""
    torch.manual_seed(8)
    heads, size, state, n = 2, 8, 16, 64
    step = make_step([(0, n, False)], 64, device)
    x, b, c = (torch.randn(n + 2, h, w, device=device) for h, w in ((heads, size), (1, state), (1, state)))
    dt = torch.rand(n + 2, heads, device=device) + 2
    zero = torch.zeros(heads, device=device)
    weights = ssd_scan.SsdWeights(zero - 40, zero, zero, (0.0, 9e9))
    y = torch.empty(n + 2, heads, size, device=device)
    op(x, dt, b, c, weights, torch.zeros(70, heads, size, state, device=device), step, y)
    want = functional.softplus(dt.double())[..., None] * (b.double() * c.double()).sum(-1, keepdim=True) * x
    torch.testing.assert_close(y[:n].double(), want[:n], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("block_size", "rows"), CASES)
@pytest.mark.parametrize("op", [selective_scan.selective_scan_torch, selective_scan.selective_scan_triton])
def test_selective_scan(op, block_size, rows, device) -> None:
    torch.manual_seed(5)
    size, state = 37, 5
    step = make_step(rows, block_size, device)
    n = len(step.token_rows)
    parts = torch.randn(n, 3 * size + 2 * state, device=device).split([size, size, size, state, state], 1)
    inputs = selective_scan.SelectiveInputs(*parts)
    weights = selective_scan.SelectiveWeights(
        -torch.rand(size, state, device=device) - 0.1,
        torch.randn(size, device=device),
        torch.randn(size, device=device) - 1,
    )
    pool = make_pool((size, state), torch.float32, device)
    before, y = pool.clone(), torch.full((n, size), 7777.0, device=device)
    op(inputs, weights, pool, step, y)
    x, dt, gate, b, c = inputs
    seconds = functional.softplus(dt + weights.dt_bias)

    def advance(h: torch.Tensor, t: int):
        h = (seconds[t][:, None] * weights.a).exp() * h + (seconds[t] * x[t])[:, None] * b[t]
        return h, ((h * c[t]).sum(-1) + weights.skip * x[t]) * functional.silu(gate[t])

    check(Recurrence(before, advance), step, pool, before, y, {"rtol": 1e-4, "atol": 1e-4})


def test_state_may_be_kept_in_fewer_bits(device) -> None:
    """bfloat16 states: a scan in several steps stays near the scan in one."""
    torch.manual_seed(6)
    heads, size, state, n = 2, 8, 16, 40
    x, b, c = (torch.randn(n, h, w, device=device) for h, w in ((heads, size), (1, state), (1, state)))
    dt = torch.randn(n, heads, device=device)
    weights = ssd_scan.SsdWeights(
        -torch.rand(heads, device=device),
        torch.ones(heads, device=device),
        torch.zeros(heads, device=device),
        (0, 9e9),
    )
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        pool, y = make_pool((heads, size, state), dtype, device), torch.zeros(n, heads, size, device=device)
        for first, last in ((0, 7), (7, 8), (8, n)):
            step = make_step([(first, last - first, False)], 64, device)
            tokens = slice(first, last)
            part = torch.zeros(len(step.token_rows), heads, size, device=device)
            padded = [torch.cat([part_[tokens], part_[:2]]) for part_ in (x, dt, b, c)]
            ssd_scan.ssd_scan(*padded, weights, pool, step, part)
            y[tokens] = part[: last - first]
        results[dtype] = y
    torch.testing.assert_close(results[torch.bfloat16], results[torch.float32], rtol=0.1, atol=0.15)


@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("block", [16 * 16, 32 * 128, 64 * 64, 64 * 128, 64 * 256, 64 * 512])
def test_a_state_fits_in_the_registers_of_its_program(block: int, item_size: int) -> None:
    options = ssd_decode.launch_options(block, item_size)
    threads = 32 * options["num_warps"]
    assert threads * options["maxnreg"] <= 65536
    assert block // threads <= options["maxnreg"] // 2


@pytest.mark.parametrize("chunk", [4, 64])
def test_the_chunks_of_every_row_have_slots_of_their_own(chunk: int) -> None:
    draw = random.Random(chunk)
    lengths = [draw.choice((0, 1, 2, chunk - 1, chunk, chunk + 1, 3 * chunk)) for _ in range(300)]
    start = free = 0
    for row, length in enumerate(lengths):
        computed = draw.randrange(2 * chunk)
        first = state_chunks.first_slot.fn(start, row, chunk)
        assert first >= free
        free = first + (computed + length - 1) // chunk - computed // chunk + 1
        start += length
    assert free <= state_chunks.num_slots(start, len(lengths), chunk)
