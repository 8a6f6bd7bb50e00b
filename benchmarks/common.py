"""What every benchmark shares: model shapes, an open `LLM`, timing, and the report (table, JSON, plot)."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from model_shapes import MODELS

from core_runner import LLM, SamplingParams

Report = dict[str, Any]

# Room for the longest request of every workload; at most 8,192 tokens a step and 256 requests in a batch.
FULL = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 1024, "max_num_batched_tokens": 8192}
SMALL = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 64}
MAX_NUM_REQS = {False: 256, True: 8}  # by --small


def make_parser(file: str, description: str | None, repeats: int = 3) -> argparse.ArgumentParser:
    """The options that every benchmark has. file: the script."""
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{Path(file).name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, help="shape of the model (default: qwen3-0.6b)")
    parser.add_argument("--small", action="store_true", help="a tiny model and tiny workloads on the CPU")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed runs; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG or SVG (needs matplotlib)")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="measure nothing: show this report")
    return parser


def run_script(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Report],
    show: Callable[[Report], None],
    plot: Callable[[Report, Path], None],
) -> None:
    """Parse, measure (or read a report), print it, and write and draw it where that was asked for."""
    args = parser.parse_args(argv)
    args.model = args.model or ("tiny" if args.small else "qwen3-0.6b")
    if args.from_json:
        report = json.loads(args.from_json.read_text(encoding="utf-8"))
    else:
        if not (args.small or torch.cuda.is_available()):
            parser.error("these sizes need a GPU; --small runs on the CPU")
        command = f"{parser.prog} {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()
        report = {"environment": environment(args.model, args.small, command), **measure(args)}
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items() if name != "command"))
    print(report["environment"]["command"])
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(report, args.plot)


@contextmanager
def open_llm(model: str, small: bool, **options: Any) -> Iterator[LLM]:
    """An `LLM` of the named shape with random weights and no prefix hits; its memory is free afterwards."""
    settings = {"max_num_reqs": MAX_NUM_REQS[small], **(SMALL if small else FULL), **options}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODELS[model]))
        llm = LLM(directory, load_format="dummy", enable_prefix_caching=False, seed=0, **settings)
        try:
            yield llm
        finally:
            llm.close()
            del llm
            free_memory()


def free_memory() -> None:
    """Give the memory of what was dropped back to the device, for whoever comes next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def greedy(num_tokens: int, temperature: float = 0.0) -> SamplingParams:
    """Exactly `num_tokens` tokens, whatever they are."""
    return SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each run; the device is idle before and after it."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def median(values: Sequence[float]) -> float:
    """The median, as a plain float."""
    return float(statistics.median(values))


def environment(model: str, small: bool, command: str) -> dict[str, str]:
    """What a figure depends on beside the code: machine, versions, model, command."""
    on_gpu = torch.cuda.is_available() and not small
    versions = {name: _version(name) for name in ("torch", "triton", "transformers", "core-runner")}
    return {
        "machine": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version},
        "model": model,
        "command": command,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def show_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table as plain text: the first column left, numbers right."""
    cells = [list(map(_cell, row)) for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    print(f"\n{title}" if title else "", flush=True)
    for row in cells:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([row[0].ljust(len(first)), *others]).rstrip(), flush=True)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
