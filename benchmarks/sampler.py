"""Time of the sampler as a multiple of reading its logits once: 256 rows of 151,936 ids in bf16.

    python benchmarks/sampler.py [--json FILE] [--check-only | --flashinfer]

Every case is first compared with the torch twins. The floor is the faster of a Triton kernel and torch's amax that
read the same bytes. A timing is the replay of a CUDA graph of one call on each of several copies of the logits, so
that neither the host nor the L2 cache counts; where a call cannot be captured, it is timed by events and marked.
Beside it: the case as one writes it in torch. Memory is the allocator's peak above what was allocated before the call.
--flashinfer times FlashInfer's sampling of the same cases, and nothing else, for it may have to compile first.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # --check-only still works

from attention import best_seconds, show
from sampler_cases import CASES, Case, make_batch, make_logits, make_sampler, straightforward

from model_states import InputBatch
from model_states.kernels.triton_import import tl, triton

MODULES = (
    "bad_words best_ids group_maxima gumbel_argmax logit_entries logprobs nucleus penalties processed_logits "
    "top_k_top_p working_logits"
).split()
KINDS = ("peaked", "flat")
COPIES = 4


@triton.jit
def _read_kernel(logits, stride, num_columns, out, BLOCK: tl.constexpr, SPAN: tl.constexpr) -> None:  # noqa: ANN001
    """The largest of SPAN blocks of one row: nothing but the read."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    for i in tl.static_range(SPAN):
        at = (tl.program_id(1) * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + at, mask=at < num_columns, other=-float("inf"))
        best = tl.maximum(best, x.to(tl.float32))
    tl.store(out + row * tl.num_programs(1) + tl.program_id(1), tl.max(best, axis=0))


def read_seconds(copies: list[torch.Tensor]) -> float:
    """Seconds to read one copy, by the fastest of several ways."""
    num_rows, num_columns = copies[0].shape
    times = [per_copy(lambda x: x.amax(dim=1), copies)[0]]
    for block, span, warps in itertools.product((2048, 4096, 8192), (1, 4), (4, 8)):
        parts = triton.cdiv(num_columns, block * span)
        out = torch.empty(num_rows, parts, device=copies[0].device)

        launch = partial(_read_kernel[(num_rows, parts)], BLOCK=block, SPAN=span, num_warps=warps)
        rest = (copies[0].stride(0), num_columns, out)
        times.append(per_copy(lambda x, run=launch, rest=rest: run(x, *rest), copies)[0])
    return min(times)


def per_copy(call: Callable[[torch.Tensor], object], copies: list[torch.Tensor]) -> tuple[float, str]:
    """Seconds of `call(logits)` on one copy, and how they were measured."""

    def every_copy() -> None:
        for logits in copies:
            call(logits)

    try:
        return best_seconds(every_copy) / len(copies), "graph"
    except RuntimeError:
        torch.cuda.synchronize()
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        every_copy()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times) / len(copies), "events"


@contextmanager
def kernels(use_triton: bool) -> Iterator[None]:
    """Have every operation of the sampler run in Triton, or in torch."""
    modules = [importlib.import_module(f"core_runner.sampling.kernels.{name}") for name in MODULES]
    before = [module.use_triton for module in modules]
    for module in modules:
        module.use_triton = lambda tensor: use_triton
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.use_triton = function


def check(device: torch.device) -> list[dict[str, Any]]:
    """How many rows of each case differ between Triton and torch; a near tie may make one differ on a GPU."""
    num_rows, vocab_size = (64, 151_936) if device.type == "cuda" else (3, 1500)
    results = []
    for kind, (name, case) in itertools.product(KINDS, CASES.items()):
        logits = make_logits(kind, num_rows, vocab_size, torch.bfloat16, device, seed=3)
        batch, outputs = make_batch(num_rows, device), []
        for use_triton in (True, False):
            with kernels(use_triton):
                outputs.append(make_sampler(case, num_rows, vocab_size, device).sample(logits, batch))
        one, other = outputs
        differ = int((one.token_ids != other.token_ids).sum())
        ok = differ <= num_rows // 50 and not bool(one.failed.any())
        if one.logprob_values is not None and other.logprob_values is not None:
            ok &= bool((one.logprob_values[:, 1:] - other.logprob_values[:, 1:]).abs().max() < 1e-3)
        results.append({"logits": kind, "case": name, "rows": num_rows, "differ": differ, "ok": ok})
    return results


def flashinfer_call(case: Case) -> Callable[[torch.Tensor], object] | None:
    """FlashInfer's sampling of the case; None where it has none."""
    sampling = importlib.import_module("flashinfer.sampling")
    options = {name: value for name, value in case.options.items() if name != "temperature"}
    temperature = case.options.get("temperature", 1.0)
    if temperature == 0.0:
        return None
    fixed = {"seed": 0, "offset": 0}  # else they are read from torch's generator, which no graph can record

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x if temperature == 1.0 else x.float() / temperature

    def probs(x: torch.Tensor) -> torch.Tensor:
        return sampling.softmax(x, temperature)

    if not options:
        return lambda x: sampling.sampling_from_logits(scaled(x), **fixed)
    if options.keys() == {"top_p"}:
        return lambda x: sampling.top_p_sampling_from_probs(probs(x), options["top_p"], **fixed)
    if options.keys() == {"top_k", "top_p"}:
        return lambda x: sampling.top_k_top_p_sampling_from_logits(
            scaled(x), options["top_k"], options["top_p"], filter_apply_order="top_k_first", **fixed
        )
    if options.keys() == {"min_p"}:
        return lambda x: sampling.min_p_sampling_from_probs(probs(x), options["min_p"], **fixed)
    return None


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that a call needs beside what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_case(name: str, copies: list[torch.Tensor], batch: InputBatch, floor: float) -> dict[str, Any]:
    """One row of results."""
    case, logits = CASES[name], copies[0]
    sampler = make_sampler(case, *logits.shape, logits.device)
    seconds, how = per_copy(lambda x: sampler.sample(x, batch), copies)
    row = {"case": name, "us": seconds * 1e6, "x floor": seconds / floor, "timed by": how}
    row["MB"] = peak_bytes(lambda: sampler.sample(logits, batch)) / 1e6
    row["torch us"] = per_copy(lambda x: straightforward(case, x), copies)[0] * 1e6
    row["torch MB"] = peak_bytes(lambda: straightforward(case, logits)) / 1e6
    return row | {"reads": case.reads}


def measure(device: torch.device, num_rows: int, vocab_size: int) -> list[dict[str, Any]]:
    """Every case on both kinds of logits."""
    batch, results = make_batch(num_rows, device), []
    for kind in KINDS:
        copies = [make_logits(kind, num_rows, vocab_size, torch.bfloat16, device, i) for i in range(COPIES)]
        floor = read_seconds(copies)
        results.append({"logits": kind, "case": "read once", "us": floor * 1e6, "x floor": 1.0})
        print(f"{kind}: {copies[0].nbytes / 1e6:.1f} MB in {floor * 1e6:.1f} us", flush=True)
        for name in CASES:
            results.append({"logits": kind} | measure_case(name, copies, batch, floor))
            print(json.dumps(results[-1]), flush=True)
    return results


def measure_flashinfer(device: torch.device, num_rows: int, vocab_size: int) -> list[dict[str, Any]]:
    """The cases that FlashInfer has, on both kinds of logits."""
    results = []
    for kind in KINDS:
        copies = [make_logits(kind, num_rows, vocab_size, torch.bfloat16, device, i) for i in range(COPIES)]
        for name, case in CASES.items():
            call = flashinfer_call(case)
            if call is not None:
                seconds, how = per_copy(call, copies)
                results.append({"logits": kind, "case": name, "us": seconds * 1e6, "timed by": how})
                print(json.dumps(results[-1]), flush=True)
    return results


def main() -> int:
    """Run the parts that were asked for; 1 when Triton and torch sample differently."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--check-only", action="store_true", help="compare with the torch twins, time nothing"
    )
    either.add_argument(
        "--flashinfer", action="store_true", help="time FlashInfer's sampling and nothing else"
    )
    parser.add_argument("--rows", type=int, default=256, help="rows of logits")
    parser.add_argument("--vocab-size", type=int, default=151_936, help="ids of each row")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    failed = False
    if options.flashinfer:
        report["FlashInfer"] = measure_flashinfer(device, options.rows, options.vocab_size)
        show(f"FlashInfer, {options.rows} rows of {options.vocab_size} ids in bf16", report["FlashInfer"])
    else:
        report["check"] = check(device)
        show("rows that Triton and torch sample differently", report["check"])
        failed = not all(row["ok"] for row in report["check"])
        if device.type == "cuda" and not options.check_only:
            report["device"] = torch.cuda.get_device_name(device)
            report["cases"] = measure(device, options.rows, options.vocab_size)
            show(f"{options.rows} rows of {options.vocab_size} ids in bf16", report["cases"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n" + json.dumps(report))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
