"""`gated_delta`: twin and Triton equal the plain recurrence, token by token, states included; others' are untouched."""

from __future__ import annotations

import pytest
import torch
from linear.step_cases import CASES, NUM_PADDING, make_pool, make_step, walk
from model_states_linear.kernels.delta_chunks import DeltaInputs, DeltaWeights
from model_states_linear.kernels.gated_delta import gated_delta_torch, gated_delta_triton
from torch.nn import functional

OPS = [gated_delta_torch, gated_delta_triton]
# (key heads, value heads, key size, value size)
SHAPES = [(2, 4, 12, 8), (1, 1, 5, 70)]


def make_inputs(n: int, shape: tuple[int, int, int, int], device: torch.device) -> DeltaInputs:
    """Views of one wide tensor, as a layer hands them over; padding tokens hold garbage."""
    key_heads, heads, key_size, value_size = shape
    sizes = [key_heads * key_size, key_heads * key_size, heads * value_size, heads, heads]
    wide = torch.randn(n, sum(sizes), device=device)
    wide[-NUM_PADDING:] = torch.nan
    q, k, v, a, b = wide.split(sizes, 1)
    by_key = (key_heads, key_size)
    return DeltaInputs(
        q.unflatten(1, by_key), k.unflatten(1, by_key), v.unflatten(1, (heads, value_size)), a, b
    )


def make_weights(heads: int, max_beta: float, device: torch.device) -> DeltaWeights:
    # Some heads forget within a token or two, others hardly at all.
    rate = -torch.logspace(-6, 0, heads, device=device)
    return DeltaWeights(rate, torch.randn(heads, device=device), max_beta)


def recurrence(inputs: DeltaInputs, weights: DeltaWeights):
    """(advance a state by one token, read it for that token), in float64."""
    q, k, v, a, b = (part.double() for part in inputs)
    repeats = v.shape[1] // k.shape[1]
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 1) for x in (q, k)
    )
    decay = (weights.rate.double() * functional.softplus(a + weights.dt_bias)).exp()
    beta = weights.max_beta * b.sigmoid()

    def advance(state: torch.Tensor, t: int) -> torch.Tensor:
        state = decay[t][:, None, None] * state.double()
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        return state + torch.einsum("h,hv,hk->hvk", beta[t], error, k[t])

    def read(state: torch.Tensor, t: int) -> torch.Tensor:
        return torch.einsum("hvk,hk->hv", state, q[t]) / q.shape[-1] ** 0.5

    return advance, read


def check(op, step, inputs, weights, tolerance: float = 1e-4) -> None:
    heads, value_size, key_size = inputs.v.shape[1], inputs.v.shape[2], inputs.k.shape[2]
    n = len(step.token_rows)
    pool = make_pool(heads, value_size, key_size, device=inputs.v.device)
    before, y = pool.clone(), torch.full((n, heads, value_size), 7777.0, device=pool.device)
    want_y, want_pool, written = y.clone(), pool.clone(), set()
    op(inputs, weights, pool, step, y)
    advance, read = recurrence(inputs, weights)
    for token, state, targets in walk(step, before, advance):
        want_y[token] = read(state, token)
        for target in targets:
            want_pool[target] = state
        written.update(targets)
    if step.is_decode:
        want_y[-NUM_PADDING:] = 0
    torch.testing.assert_close(y, want_y, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool, want_pool, rtol=tolerance, atol=tolerance)
    others = torch.tensor([row for row in range(len(pool)) if row not in written])
    assert 0 in others
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize(("shape", "max_beta"), zip(SHAPES, (1.0, 2.0), strict=True))
@pytest.mark.parametrize(("block_size", "rows"), CASES)
@pytest.mark.parametrize("op", OPS)
def test_equals_the_plain_recurrence(op, block_size, rows, shape, max_beta, device) -> None:
    torch.manual_seed(4)
    step = make_step(rows, block_size, device)
    inputs = make_inputs(len(step.token_rows), shape, device)
    check(op, step, inputs, make_weights(shape[1], max_beta, device))


@pytest.mark.parametrize("op", OPS)
def test_keys_that_are_all_alike(op, device) -> None:
    """A token said again and again: every correction takes all before it, and a sloppy inverse explodes."""
    torch.manual_seed(5)
    step = make_step([(0, 100, False)], 64, device)
    inputs = make_inputs(len(step.token_rows), (1, 2, 16, 16), device)
    inputs.k[:] = inputs.k[:1] + 1e-3 * torch.randn_like(inputs.k)
    inputs.b[:] = 9.0
    check(op, step, inputs, make_weights(2, 1.0, device), 2e-3)


@pytest.mark.parametrize("op", OPS)
def test_small_decays_are_not_rounded_away(op, device) -> None:
    """softplus(x) is e^x where 1 + e^x is 1 in fp32."""
    step = make_step([(5, 1, False)], 16, device)
    inputs = make_inputs(len(step.token_rows), (1, 1, 16, 16), device)
    inputs.a[:] = -18.0
    inputs.b[:] = -60.0
    weights = DeltaWeights(torch.tensor([-2e6], device=device), torch.zeros(1, device=device), 1.0)
    check(op, step, inputs, weights)


@pytest.mark.parametrize("rows", [CASES[0][1], CASES[3][1]])
def test_tokens_and_states_in_fewer_bits(rows, device) -> None:
    """float16 tokens, with states of either width; sums are fp32 all the same."""
    for state_dtype in (torch.float32, torch.float16):
        torch.manual_seed(7)
        step = make_step(rows, 16, device)
        wide = make_inputs(len(step.token_rows), (2, 4, 16, 16), device)
        narrow, weights = DeltaInputs(*(part.half() for part in wide)), make_weights(4, 1.0, device)
        results = []
        for op in OPS:
            torch.manual_seed(8)
            pool = make_pool(4, 16, 16, device=device).to(state_dtype)
            y = torch.zeros(narrow.v.shape, dtype=torch.float16, device=device)
            op(narrow, weights, pool, step, y)
            results.append((y.float(), pool.float()))
        for got, want in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_twin_is_transformers_rule() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.manual_seed(6)
    step = make_step([(0, 70, False)], 64, torch.device("cpu"))
    inputs, weights = (
        make_inputs(72, (2, 4, 12, 8), torch.device("cpu")),
        make_weights(4, 1.0, torch.device("cpu")),
    )
    pool, y = make_pool(4, 8, 12, device=torch.device("cpu")), torch.zeros(72, 4, 8)
    gated_delta_torch(inputs, weights, pool, step, y)
    q, k, v, a, b = (part[None, :70] for part in inputs)
    g = weights.rate * functional.softplus(a + weights.dt_bias)
    # Older releases of transformers leave it to the caller to repeat key heads.
    q, k = (part.repeat_interleave(2, 2) for part in (q, k))
    want, state = torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=b.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(y[:70], want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool[int(step.final_rows[0])], state[0].mT, rtol=1e-4, atol=1e-5)
