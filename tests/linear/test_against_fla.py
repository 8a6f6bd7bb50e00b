"""Where fla-core's gated delta rule and ours both apply, they agree. Skipped where it is not installed.

Its chunked rule and its recurrent one take packed rows with a state each, and leave the last state of each. On a GPU
the products of its chunked rule are TF32 in float32, and ours are not.
"""

from __future__ import annotations

import pytest
import torch
from linear.step_cases import CASES, make_pool, make_step
from linear.test_gated_delta import make_inputs, make_weights
from model_states_linear.kernels.delta_chunks import DeltaInputs, DeltaWeights
from model_states_linear.kernels.gated_delta import gated_delta_triton
from support.peer_kernels import (
    counted_range,
    distance,
    hold_to_one_configuration,
    need_no_gpu,
    rounding,
    token_dtype,
)

from model_states.recurrent_step import RecurrentStep

SHAPE = (2, 4, 24, 16)  # key heads, value heads, key size, value size
# (tokens computed, tokens of the step, whether it holds drafts) of each row.
ROWS = {
    "cold": [(0, 70, False)],
    "warm": [(70, 50, False)],
    "packed": [(0, 37, False), (70, 20, False), (0, 1, False), (15, 66, False)],
}


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch, device: torch.device):
    """Its two operations by name."""
    pytest.importorskip("fla.ops.gated_delta_rule", reason="fla-core is not installed")
    from fla.ops import gated_delta_rule as rules
    from fla.ops.common import chunk_delta_h

    hold_to_one_configuration(monkeypatch, "fla")
    if device.type == "cpu":
        need_no_gpu(monkeypatch)
        monkeypatch.setattr(chunk_delta_h, "range", counted_range, raising=False)
    return {"chunk": rules.chunk_gated_delta_rule, "recurrent": rules.fused_recurrent_gated_delta_rule}


def limit(rule: str, dtype: torch.dtype, device: torch.device) -> float:
    return rounding(dtype, tensor_cores=rule == "chunk" and device.type == "cuda")


def ours(
    inputs: DeltaInputs, weights: DeltaWeights, step: RecurrentStep, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y of every token, and the states of the rows before and after, [num_rows, H, V, K]."""
    heads, key_size, value_size = inputs.v.shape[1], inputs.k.shape[2], inputs.v.shape[2]
    pool = make_pool(heads, value_size, key_size, device=inputs.v.device).to(inputs.v.dtype)
    before = pool[step.source_rows[:num_rows]]
    y = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
    gated_delta_triton(inputs, weights, pool, step, y)
    return y, before, pool[step.final_rows[:num_rows]]


def theirs(rule, inputs: DeltaInputs, weights: DeltaWeights, before: torch.Tensor, **packing):
    """The same of fla-core: inputs are [batch, tokens, ..]."""
    return rule(
        inputs.q,
        inputs.k,
        inputs.v,
        g=inputs.a,
        beta=inputs.b,
        initial_state=before.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=(-weights.rate).log(),
        dt_bias=weights.dt_bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=weights.max_beta == 2.0,
        state_v_first=True,
        **packing,
    )


def case(rows, block_size: int, dtype: torch.dtype, max_beta: float, device: torch.device):
    """The step, its inputs and weights."""
    torch.manual_seed(len(rows))
    step = make_step(rows, block_size, device)
    inputs = make_inputs(len(step.token_rows), SHAPE, device)
    return step, DeltaInputs(*(part.to(dtype) for part in inputs)), make_weights(SHAPE[1], max_beta, device)


@pytest.mark.parametrize("max_beta", [1.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("rule", ["chunk", "recurrent"])
def test_rows_of_many_tokens(rule, kind, dtype, max_beta, fla, device) -> None:
    rows, dtype = ROWS[kind], token_dtype(dtype, device)
    step, inputs, weights = case(rows, 64, dtype, max_beta, device)
    y, before, after = ours(inputs, weights, step, len(rows))
    num_tokens = sum(count for _, count, _ in rows)
    real = DeltaInputs(*(part[None, :num_tokens] for part in inputs))
    starts = step.query_start_loc[: len(rows) + 1].long()
    want_y, want_after = theirs(fla[rule], real, weights, before, cu_seqlens=starts)
    for row in range(len(rows)):
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        assert distance(y[tokens], want_y[0, tokens]) < limit(rule, dtype, device)
        assert distance(after[row], want_after[row]) < limit(rule, dtype, device)


@pytest.mark.parametrize("max_beta", [1.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_step(dtype, max_beta, fla, device) -> None:
    (block_size, rows), dtype = CASES[-1], token_dtype(dtype, device)
    step, inputs, weights = case(rows, block_size, dtype, max_beta, device)
    assert step.is_decode
    y, before, after = ours(inputs, weights, step, len(rows))
    real = DeltaInputs(*(part[: len(rows), None] for part in inputs))
    want_y, want_after = theirs(fla["recurrent"], real, weights, before)
    for row in range(len(rows)):
        assert distance(y[row], want_y[row, 0]) < limit("recurrent", dtype, device)
        assert distance(after[row], want_after[row]) < limit("recurrent", dtype, device)
