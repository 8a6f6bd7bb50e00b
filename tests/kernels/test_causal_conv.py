"""`causal_conv`: twin and Triton equal a plain convolution over the whole sequence, states included."""

from __future__ import annotations

import pytest
import torch
from mamba.step_cases import DECODE, MIXED, NUM_PADDING, expected_states, make_pool, make_step

from model_states.kernels import causal_conv

LONG = (4, [(3, 70, False)])  # its states are kept by several programs
OPS = [causal_conv.causal_conv_torch, causal_conv.causal_conv_triton]


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize(("block_size", "rows"), [*MIXED, LONG, DECODE])
@pytest.mark.parametrize("op", OPS)
def test_equals_the_whole_convolution(op, block_size, rows, width, device) -> None:
    torch.manual_seed(2)
    size, silu = 37, width == 4
    step = make_step(rows, block_size, device, max_blocks=20)
    num_tokens = len(step.token_rows)
    x = torch.randn(num_tokens, 2 * size, device=device)[:, size:]  # tokens apart
    weight, bias = torch.randn(width, size, device=device).T, torch.randn(size, device=device)
    bias, weight = (bias, weight) if silu else (None, weight.contiguous())  # taps apart, or channels
    pool = make_pool((width - 1, size), torch.float32, device)
    before = pool.clone()
    out = torch.full((num_tokens, size), 7777.0, device=device)
    op(x, weight, bias, silu, pool, step, out)

    def inputs(source: int, tokens: range) -> torch.Tensor:
        return torch.cat([before[source], x[tokens.start : tokens.stop]])

    starts = step.query_start_loc.tolist()
    for b in range(len(rows)):
        tokens = range(starts[b], starts[b + 1])
        window = inputs(int(step.source_rows[b]), tokens).unfold(0, width, 1)  # [tokens, size, width]
        want = (window * weight).sum(-1) + (0 if bias is None else bias)
        want = torch.nn.functional.silu(want) if silu else want
        torch.testing.assert_close(out[tokens.start : tokens.stop], want, rtol=1e-5, atol=1e-5)
    padding = out[num_tokens - NUM_PADDING :]
    assert (padding == (0.0 if step.is_decode else 7777.0)).all()
    want_pool = before.clone()
    states = expected_states(step, lambda source, tokens: inputs(source, tokens)[-(width - 1) :])
    for row, state in states.items():
        want_pool[row] = state
    torch.testing.assert_close(pool, want_pool, rtol=0, atol=0)
    assert states.keys().isdisjoint({0})
