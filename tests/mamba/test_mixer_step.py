"""`mixer_step`: one kernel equals convolution, scan and norm after one another, states included."""

from __future__ import annotations

import pytest
import torch
from mamba.step_cases import DECODE, make_pool, make_step
from model_states_mamba.kernels.gated_norm import GatedNorm
from model_states_mamba.kernels.mixer_step import (
    MixerWeights,
    StepShape,
    mixer_step_torch,
    mixer_step_triton,
    step_shape,
)
from model_states_mamba.kernels.ssd_scan import SsdWeights

# (heads, groups, head size, state size, width, bias)
SHAPES = [(4, 2, 8, 12, 4, True), (3, 1, 24, 16, 3, False), (6, 3, 5, 7, 2, True)]
# (groups of the norm, gate last); None is the gate alone
NORMS = [(1, False), (1, True), ("groups", False), None]


def make_weights(shape, norm, device) -> MixerWeights:
    heads, groups, head_size, state_size, width, has_bias = shape
    size = heads * head_size
    conv_size = size + 2 * groups * state_size
    conv_weight = torch.randn(conv_size, width, device=device)
    ssd = SsdWeights(
        -torch.rand(heads, device=device) - 0.1,
        torch.randn(heads, device=device),
        torch.randn(heads, device=device) - 1,
        (0.05, 2.0),
    )
    gated_norm = None
    if norm is not None:
        num_groups = groups if norm[0] == "groups" else 1
        gated_norm = GatedNorm(torch.randn(size, device=device), 1e-4, size // num_groups, norm[1])
    bias = torch.randn(conv_size, device=device) if has_bias else None
    return MixerWeights(conv_weight, conv_weight.T.contiguous(), bias, ssd, gated_norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_its_parts(shape, norm, device) -> None:
    torch.manual_seed(3)
    heads, groups, head_size, state_size, width, _ = shape
    size = heads * head_size
    conv_size = size + 2 * groups * state_size
    weights = make_weights(shape, norm, device)
    block_size, rows = DECODE
    step = make_step(rows, block_size, device)
    num_rows = len(step.seq_lens)
    wide = torch.randn(num_rows, size + conv_size + heads + 6, device=device)
    wide[len(rows) :] = torch.nan
    projected = wide[:, 3:-3]
    pools = [
        make_pool((width - 1, conv_size), torch.float32, device),
        make_pool((heads, head_size, state_size), torch.float32, device),
    ]
    results = []
    for op in (mixer_step_torch, mixer_step_triton):
        mine = [pool.clone() for pool in pools]
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=device)
        out = torch.full((num_rows, size), 7777.0, device=device)
        op(
            torch.nan_to_num(projected) if op is mixer_step_torch else projected,
            weights,
            *mine,
            step,
            arrivals,
            out,
        )
        assert not arrivals.any()
        results.append((out, *mine))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    kept = set(step.final_rows.tolist())
    untouched = [row for row in range(len(pools[0])) if row not in kept or row == 0]
    for pool, before in zip(results[1][1:], pools, strict=True):
        assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("shape", [StepShape(1, 4, 4, 2), StepShape(2, 8, 4, 3), StepShape(6, 16, 2, 1)])
def test_any_number_of_programs_gives_the_same(shape, device) -> None:
    torch.manual_seed(4)
    weights = make_weights((6, 1, 20, 16, 4, True), (1, False), device)
    step = make_step(DECODE[1], DECODE[0], device)
    num_rows, size, conv_size = len(step.seq_lens), 120, 152
    projected = torch.randn(num_rows, size + conv_size + 6, device=device)
    pools = make_pool((3, conv_size), torch.float32, device), make_pool((6, 20, 16), torch.float32, device)
    results = []
    for pick in (None, shape):
        mine = [pool.clone() for pool in pools]
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=device)
        out = projected.new_empty(num_rows, size)
        mixer_step_triton(projected, weights, *mine, step, arrivals, out, pick)
        assert not arrivals.any()
        results.append((out, *mine))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_groups", [1, 2, 8])
@pytest.mark.parametrize("num_heads", [8, 24, 48, 128])
@pytest.mark.parametrize("num_rows", [1, 5, 64, 256, 1000])
def test_each_program_has_whole_heads_of_one_group(num_rows: int, num_heads: int, num_groups: int) -> None:
    shape = step_shape(num_rows, num_heads, num_groups, 64)
    assert shape.num_programs % num_groups == 0
    assert num_heads % shape.num_programs == 0
