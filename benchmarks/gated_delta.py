"""The gated delta rule of one layer of Qwen3-Next-80B: our kernels, and fla-core's where it can be imported.

    python benchmarks/gated_delta.py [--json FILE] [--small]

A time is the median replay of a CUDA graph of one call; of a decode step one for each of several layers, whose states
are more than the L2 cache holds. Each call does the whole operation: norms of queries and keys, decays, betas, the
rule, and the states afterwards. Tokens are bfloat16. Ours takes states from rows of a pool and leaves them there, in
the prefill also those at the ends of blocks of 256 tokens; *ours* keeps them in bfloat16, as it does by default,
*ours fp32* in float32. fla-core's chunked rule (prefill, packed rows) and recurrent one (decode) take float32 states
one after the other and return new ones: a server would move them from and to its requests besides, which is not
counted. *floor* is what a call must read and write of tokens and bfloat16 states at 4.3 TB/s. *off* is |y - y'| /
|y'| for a float32 reference y', the worse of outputs and last states, with float32 states. On a CPU (--small) our
torch twin is timed alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import environment, median, show_table, timed
from few_rows import microseconds
from model_states_linear.kernels.delta_chunks import DeltaInputs, DeltaWeights
from model_states_linear.kernels.gated_delta import gated_delta, gated_delta_torch

from model_states.recurrent_step import RecurrentStep

DTYPE, MEMORY_RATE, BLOCK_SIZE = torch.bfloat16, 4.3e12, 256
STATE_BYTES, MAX_LAYERS = 256e6, 64  # of the layers of a decode step, about

Operation = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """Heads and sizes of a layer."""

    key_heads: int
    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class Case:
    """Rows of as many tokens each, after as many computed ones."""

    name: str
    rows: int
    tokens: int
    computed: int


# By --small.
SHAPE = {False: Shape(16, 32, 128, 128), True: Shape(1, 2, 16, 16)}
CASES = {
    False: [
        Case("decode 1", 1, 1, 128),
        Case("decode 64", 64, 1, 128),
        Case("decode 256", 256, 1, 128),
        Case("prefill 64 x 128", 64, 128, 0),
        Case("prefill 2 x 4096", 2, 4096, 0),
    ],
    True: [Case("decode 4", 4, 1, 128), Case("prefill 2 x 40", 2, 40, 0)],
}


def make_step(case: Case, device: torch.device) -> RecurrentStep:
    """The step of these rows, each with blocks of its own."""
    int32 = {"dtype": torch.int32, "device": device}
    end, num_tokens = case.computed + case.tokens, case.rows * case.tokens
    blocks = -(-end // BLOCK_SIZE)
    table = 1 + torch.arange(case.rows * blocks, **int32).view(case.rows, blocks)
    none = torch.zeros(case.rows, **int32)
    return RecurrentStep(
        query_start_loc=torch.arange(0, num_tokens + 1, case.tokens, **int32),
        seq_lens=none + end,
        block_table=table,
        block_size=BLOCK_SIZE,
        source_rows=table[:, (case.computed - 1) // BLOCK_SIZE].contiguous() if case.computed else none,
        final_rows=table[:, -1].contiguous(),
        scratch_rows=none,
        token_rows=torch.arange(case.rows, **int32).repeat_interleave(case.tokens),
        is_decode=case.tokens == 1,
    )


class Operands:
    """Random tokens, weights and states of one case, and the two ways to compute it."""

    def __init__(self, case: Case, shape: Shape, device: torch.device) -> None:
        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(case.rows * case.tokens, *sizes, dtype=DTYPE, device=device)

        self.case, self.step = case, make_step(case, device)
        by_key = (shape.key_heads, shape.key_size)
        by_value = (shape.heads, shape.value_size)
        self.inputs = DeltaInputs(
            normal(*by_key), normal(*by_key), normal(*by_value), normal(shape.heads), normal(shape.heads)
        )
        # Time steps of 0.001 to 0.1 and rates of 1 to 16, as state space models start with: some heads forget slowly.
        time_step = torch.logspace(-3, -1, shape.heads, device=device)
        rate = -torch.linspace(1, 16, shape.heads, device=device)
        self.weights = DeltaWeights(rate, time_step.expm1().log(), 1.0)
        self.state_shape = (shape.heads, shape.value_size, shape.key_size)
        self.y = torch.empty_like(self.inputs.v)

    def pool(self, dtype: torch.dtype) -> torch.Tensor:
        """States of noise, but for row 0."""
        generator = torch.Generator(self.y.device).manual_seed(1)
        shape = (1 + self.step.block_table.numel(), *self.state_shape)
        pool = torch.randn(shape, device=self.y.device, generator=generator).to(dtype)
        pool[0] = 0
        return pool

    def before(self, pool: torch.Tensor) -> torch.Tensor | None:
        """States that the rows start from, in a row; None where all of them start from nothing."""
        return pool[self.step.source_rows] if self.case.computed else None

    def ours(self, pool: torch.Tensor) -> None:
        """Write y, and the states to the pool."""
        gated_delta(self.inputs, self.weights, pool, self.step, self.y)

    def num_bytes(self) -> int:
        """That a call must read and write at least, with states of the tokens' dtype."""
        tokens = sum(part.nbytes for part in self.inputs) + self.y.nbytes
        num_states = self.step.block_table.numel() + (self.case.rows if self.case.computed else 0)
        one: int = self.y.new_empty(self.state_shape).nbytes
        return tokens + num_states * one


def fla_rules() -> tuple[Operation, Operation] | None:
    """fla-core's chunked and recurrent rule, where it can be imported."""
    try:
        rules = import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None
    return rules.chunk_gated_delta_rule, rules.fused_recurrent_gated_delta_rule


def fla_call(operands: Operands, rules: tuple[Operation, Operation]) -> Operation:
    """Call of fla-core's operation with the states before, which gives y and the states after."""
    weights, is_decode = operands.weights, operands.step.is_decode
    rule = rules[1] if is_decode else rules[0]
    q, k, v, a, b = (part[:, None] if is_decode else part[None] for part in operands.inputs)
    # Of a tensor that it has seen it keeps what it worked out on the host, so that a graph can record the rest.
    starts = None if is_decode else operands.step.query_start_loc.long()
    log_rate = (-weights.rate).log()

    def call(states: torch.Tensor | None) -> Any:
        return rule(
            *(q, k, v),
            g=a,
            beta=b,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=log_rate,
            dt_bias=weights.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
            cu_seqlens=starts,
        )

    return call


def layer_us(call: Operation, layers: Sequence[Any], repeats: int, device: torch.device) -> float:
    """Microseconds of `call(layer)`."""

    def every_layer() -> list[Any]:
        return [call(layer) for layer in layers]  # what one gives back is not what the next one writes to

    if device.type == "cuda":
        return microseconds(every_layer, repeats) / len(layers)
    return 1e6 * median(timed(every_layer, repeats)) / len(layers)


def distance(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest |got - want| / |want|."""
    pairs = zip(got, want, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def measure_case(
    operands: Operands, rules: tuple[Operation, Operation] | None, repeats: int
) -> dict[str, Any]:
    """One row of the table."""
    device, num_layers = operands.y.device, 1
    if operands.step.is_decode:
        num_layers = min(max(1, round(STATE_BYTES / operands.num_bytes())), MAX_LAYERS)

    def us(call: Operation, layers: Sequence[Any]) -> float:
        return layer_us(call, layers, repeats, device)

    pools = [operands.pool(torch.float32) for _ in range(num_layers)]
    row: dict[str, Any] = {"step": operands.case.name}
    row["ours us"] = us(operands.ours, [pool.to(DTYPE) for pool in pools])
    row["ours fp32 us"] = us(operands.ours, pools)
    call = fla_call(operands, rules) if rules else None
    row["fla us"] = us(call, [operands.before(pool) for pool in pools]) if call else None
    row["floor us"] = 1e6 * operands.num_bytes() / MEMORY_RATE
    return row | differences(operands, call)


def differences(operands: Operands, call: Operation | None) -> dict[str, float | None]:
    """How far both are from the torch twin in float32."""
    pool, final = operands.pool(torch.float32), operands.step.final_rows
    theirs = call(operands.before(pool)) if call else None
    want_pool, want = pool.clone(), torch.empty_like(operands.y, dtype=torch.float32)
    wide = DeltaInputs(*(part.float() for part in operands.inputs))
    gated_delta_torch(wide, operands.weights, want_pool, operands.step, want)
    operands.ours(pool)
    wanted = (want, want_pool[final])
    return {
        "ours off": distance((operands.y, pool[final]), wanted),
        "fla off": distance((theirs[0].view_as(want), theirs[1]), wanted) if theirs else None,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gated_delta.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="a tiny layer on the CPU, by torch")
    parser.add_argument("--repeats", type=int, default=15, help="timed replays; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    args = parser.parse_args(argv)
    if not (args.small or torch.cuda.is_available()):
        parser.error("these sizes need a GPU; --small runs on the CPU")
    device = torch.device("cpu" if args.small else "cuda")
    rules = None if args.small else fla_rules()
    command = f"{parser.prog} {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()
    report: dict[str, Any] = {"environment": environment("one gated delta net", args.small, command)}
    if rules:
        report["environment"]["fla-core"] = import_module("fla").__version__
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()), flush=True)
    report["cases"] = []
    with torch.inference_mode():
        for case in CASES[args.small]:
            torch.manual_seed(0)
            operands = Operands(case, SHAPE[args.small], device)
            report["cases"].append(measure_case(operands, rules, args.repeats))
            print(json.dumps(report["cases"][-1]), flush=True)
    rows = report["cases"]
    show_table("one layer, microseconds", list(rows[0]), [list(row.values()) for row in rows])
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
