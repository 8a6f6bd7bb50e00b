"""Rates of the attention kernels: decode in bytes a second, prefill in FLOP a second, beside copy and matmul.

    python benchmarks/attention.py [--sweep] [--json FILE] [--check-only]

Every kernel is first compared with the torch backend. A timing is the replay of a CUDA graph of one call for each
of several layers with caches of their own, so that neither the host nor the L2 cache counts; the best of several
replays is reported. --sweep tries other cuts of the work and prints the best ones for each shape.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # --check-only still works

from attention_steps import (
    BLOCK_SIZE,
    SPEC,
    Inputs,
    Rows,
    Step,
    attention_flop,
    cache_bytes,
    layers_for,
    make_inputs,
    steps,
)

from model_states.attention import AttentionSpec, TorchAttention
from model_states.attention.triton_backend import TritonAttention
from model_states.kernels.paged_attention_decode import (
    DecodeConfig,
    decode_config,
    paged_attention_decode_triton,
    scratch_sizes,
    short_query_len,
)
from model_states.kernels.paged_attention_prefill import (
    PrefillConfig,
    paged_attention_prefill_triton,
)


def check(device: torch.device) -> list[dict[str, Any]]:
    """Largest |a - b| / (1 + |b|) from the torch backend b, for each kind of layer and step."""
    small = device.type != "cuda"
    size, dtypes = (16, [torch.float32]) if small else (128, [torch.float32, torch.bfloat16])
    base = AttentionSpec(4, 2, size, size, size**-0.5)
    specs = {
        "plain": base,
        "window": replace(base, sliding_window=37),
        "soft cap": replace(base, soft_cap=20.0),
        "sinks": replace(base, has_sinks=True),
        "head 80": replace(base, head_size=80, head_size_v=80),
        "head 256": replace(base, head_size=256, head_size_v=256),
        "head 192/128": replace(base, head_size=192, head_size_v=128),
        "14 heads of 2": replace(base, num_heads=14),
    }
    decode, prefill = [(1, 70), (1, 5)], [(40, 50), (3, 20)]
    if not small:
        decode, prefill = [(1, 3000), (1, 5), (1, 700)] * 9, [(300, 300), (129, 1000), (2, 70)]
    steps = {"decode": decode, "prefill": prefill, "mixed": decode + prefill}
    results = []
    for (kind, spec), (step, rows), dtype in itertools.product(specs.items(), steps.items(), dtypes):
        inputs = make_inputs(Step(rows), spec, dtype, device)
        sinks = torch.randn(spec.num_heads, device=device) if spec.has_sinks else None
        args = (inputs.query, *inputs.caches[0], inputs.metadata, spec, sinks)
        expected = TorchAttention().attend(*args).float()
        difference = (TritonAttention().attend(*args).float() - expected).abs()
        worst = (difference / (1 + expected.abs())).max().item()
        limit = 3e-5 if dtype == torch.float32 else 1.5e-2
        ok = worst < limit  # False for NaN too
        results.append({"layer": kind, "step": step, "dtype": str(dtype)[6:], "worst": worst, "ok": ok})
    return results


def best_seconds(call: Callable[[], object], replays: int = 10) -> float:
    """The best replay of a CUDA graph of `call`, in seconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read plus written, of a device-to-device copy of 2 GiB, by the faster of two ways.

    In a graph `copy_` is no kernel but the driver's own copy, which need not reach what the memory gives to a kernel;
    a kernel that inverts every bit moves as many bytes.
    """
    source = torch.zeros(1 << 29, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
    return 2 * source.nbytes / min(map(best_seconds, ways))


def matmul_rate(device: torch.device) -> float:
    """FLOP a second of a bf16 product of 8192 x 8192 matrices."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return 2 * 8192**3 / best_seconds(lambda: a @ a)


def seconds_per_layer(inputs: Inputs, attend: Callable[..., object]) -> float:
    """Seconds of `attend(query, key_cache, value_cache, metadata, spec)` for one layer."""

    def every_layer() -> None:
        for key_cache, value_cache in inputs.caches:
            attend(inputs.query, key_cache, value_cache, inputs.metadata, inputs.spec)

    return best_seconds(every_layer) / len(inputs.caches)


def measure(device: torch.device, copy: float, matmul: float) -> list[dict[str, Any]]:
    """Time of one layer for every step, as a rate and as a share of the copy's and the matmul's.

    A step reads keys and values and hardly writes, while the copy's bytes are read and written.
    """
    backend, results = TritonAttention(), []
    for name, step in steps().items():
        inputs = make_inputs(step, SPEC, torch.bfloat16, device, layers_for(step.rows))
        seconds = seconds_per_layer(inputs, backend.attend)
        moved, flop = cache_bytes(step.rows, SPEC, 2) / seconds, attention_flop(step.rows, SPEC) / seconds
        results.append(
            {"step": name, "us": seconds * 1e6, "TB/s": moved / 1e12, "of copy": moved / copy}
            | {"TFLOP/s": flop / 1e12, "of matmul": flop / matmul}
        )
        del inputs
    return results


def write_cache_rates(device: torch.device, copy: float) -> list[dict[str, Any]]:
    """Time of writing the keys and values of one layer; bytes are read plus written, and much of it stays in L2."""
    results = []
    for num_tokens in (1, 256, 8192):
        cache = torch.zeros(1024, BLOCK_SIZE, 8, 128, dtype=torch.bfloat16, device=device)
        key = torch.randn(num_tokens, 8, 128, dtype=torch.bfloat16, device=device)
        slots = torch.randperm(1024 * BLOCK_SIZE - BLOCK_SIZE, device=device)[:num_tokens] + BLOCK_SIZE
        args = (key, key.clone(), cache, cache.clone(), slots)
        seconds = best_seconds(lambda args=args: TritonAttention().write_cache(*args))
        moved = 4 * key.nbytes / seconds
        results.append(
            {"tokens": num_tokens, "us": seconds * 1e6, "TB/s": moved / 1e12, "of copy": moved / copy}
        )
    return results


def decode_configs(rows: Rows) -> Iterable[DecodeConfig]:
    """Other cuts of a decode step."""
    base = decode_config(len(rows), SPEC, 2)
    budgets, parts = (base.budget // 2, base.budget, base.budget * 2), (32, 64, 128, 256, 512)
    for budget, min_part, block_n, warps, stages in itertools.product(
        budgets, parts, (16, 32, 64), (1, 2, 4), (2, 3, 4)
    ):
        if min_part >= block_n:
            yield DecodeConfig(budget, min_part, block_n, warps, stages)


def prefill_configs() -> Iterable[PrefillConfig]:
    """Other cuts of a prefill step."""
    for m, n, warps, stages in itertools.product((64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)):
        # 168 or 128 registers let one program of 4 or 8 warps more run on a multiprocessor.
        for max_registers in (None, 168 if warps == 4 else 128):
            yield PrefillConfig(m, n, warps, stages, max_registers)


def sweep(device: torch.device) -> list[dict[str, Any]]:
    """The five best cuts of some steps; a cut that the GPU cannot hold is left out."""
    results = []
    for name in ("decode 1 x 384", "decode 16 x 1024", "decode 256 x 128..384", "decode 256 x 256..2041"):
        step = steps()[name]
        inputs = make_inputs(step, SPEC, torch.bfloat16, device, layers_for(step.rows))
        out = torch.empty_like(inputs.query)
        for config in decode_configs(step.rows):
            size, counters = scratch_sizes(inputs.metadata, SPEC, config)
            scratch = (
                torch.empty(size, device=device),
                torch.zeros(counters, dtype=torch.int32, device=device),
            )
            results.append(tried(name, inputs, config, out, paged_attention_decode_triton, config, *scratch))
        del inputs
    for name in ("prefill 64 x 128", "prefill 8 x 1024", "prefill 1 x 8192", "prefill 4 x 512 after 4096"):
        step = steps()[name]
        inputs = make_inputs(step, SPEC, torch.bfloat16, device, 4)
        short = short_query_len(SPEC, decode_config(len(step.rows), SPEC, 2))
        for config in prefill_configs():
            out = torch.empty_like(inputs.query)
            results.append(tried(name, inputs, config, out, paged_attention_prefill_triton, short, config))
    results = sorted((r for r in results if r), key=lambda r: (r["step"], r["us"]))
    return [r for _, rs in itertools.groupby(results, lambda r: r["step"]) for r in list(rs)[:5]]


def tried(
    name: str,
    inputs: Inputs,
    config: DecodeConfig | PrefillConfig,
    out: torch.Tensor,
    op: Callable[..., None],
    *arguments: Any,
) -> dict[str, Any]:
    """One cut's time, or nothing when it needs more shared memory or registers than there are."""

    def attend(query: torch.Tensor, *rest: Any) -> None:
        op(out, query, *rest, None, *arguments)

    try:
        return {"step": name, "us": seconds_per_layer(inputs, attend) * 1e6} | asdict(config)
    except Exception as error:
        if "OutOfResources" not in type(error).__name__:
            raise
        return {}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table with the union of their columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (r.get(c, "") for c in columns)]
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    print(f"\n{title}")
    for line in [columns, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> int:
    """Run the parts that were asked for; 1 when a kernel differs from the torch backend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check-only", action="store_true", help="compare with the torch backend, time nothing"
    )
    parser.add_argument("--sweep", action="store_true", help="try other cuts of the work too (some minutes)")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"torch": torch.__version__, "check": check(device)}
    show("difference from the torch backend", report["check"])
    failed = not all(row["ok"] for row in report["check"])
    if device.type == "cuda" and not options.check_only:
        report["device"] = torch.cuda.get_device_name(device)
        copy, matmul = copy_rate(device), matmul_rate(device)
        report |= {"copy TB/s": copy / 1e12, "matmul TFLOP/s": matmul / 1e12}
        rates = f"copy {copy / 1e12:.2f} TB/s read plus written, bf16 matmul {matmul / 1e12:.0f} TFLOP/s"
        print(f"\n{report['device']}: {rates}")
        report["steps"] = measure(device, copy, matmul)
        show("attention of one layer, 16 query heads on 8 kv heads of 128, bf16", report["steps"])
        report["write_cache"] = write_cache_rates(device, copy)
        show("cache write of one layer", report["write_cache"])
        if options.sweep:
            report["sweep"] = sweep(device)
            show("best cuts", report["sweep"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n" + json.dumps(report))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
