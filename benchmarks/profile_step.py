"""Where the time and the memory of a steady decode step go, for several numbers of requests.

    python benchmarks/profile_step.py --json profile.json --plot profile.svg

Every request has a prompt of 128 ids and decodes. *Host* is the CPU time that the calling thread spends in
`Engine.step` without its waits for the device; *wall* is the time between steps. Device time is the sum of the
durations that torch.profiler gives the device's operations, ours by the file that defines them (replays are taken
apart into their kernels). *Calls* are those of the CUDA runtime and driver, launches and replays included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import MODELS, Report, make_parser, open_llm, run_script, show_table
from plots import stacked_bars
from step_profile import CLASSES, device_profile, host_time, memory, steady_decode
from workloads import Workload

from core_runner import LLM


def profile_requests(llm: LLM, model: str, num_reqs: int, prompt_len: int, steps: int) -> dict[str, Any]:
    """One number of requests: host, wall and device time of a step."""
    num_output = 3 * steps + 48  # the first ones decode while others are prefilled
    jobs = Workload("", num_reqs, prompt_len, num_output).jobs(MODELS[model]["vocab_size"])
    step = steady_decode(llm, [job.prompt for job in jobs], num_output)
    for _ in range(steps):
        step()  # records what is missing
    found = host_time(step, steps) | device_profile(step, min(steps, 8))
    llm.engine.abort_all()
    return found


def measure(args: argparse.Namespace) -> Report:
    """All numbers of requests, on one engine that has slots for the largest."""
    prompt_len, most = (8, 8) if args.small else (128, 1024)
    counts = args.requests or ([1, 4, 8] if args.small else [1, 64, 256, 1024])
    num_steps = args.steps or (4 if args.small else 64)
    sizes = {} if args.small else {"max_model_len": 512}
    with open_llm(args.model, args.small, max_num_reqs=max(most, *counts), **sizes) as llm:
        steps = {}
        for count in counts:
            steps[str(count)] = profile_requests(llm, args.model, count, prompt_len, num_steps)
            print(f"{count} requests: {steps[str(count)]['wall_ms']:.3f} ms a step", flush=True)
        return {"steps": steps, "memory_gib": memory(llm)}


def show(report: Report) -> None:
    """Times, classes and calls, then the longest kernels of the largest batch."""
    steps = report["steps"]
    rows = [
        [label, *(found[key] for found in steps.values())]
        for label, key in (
            ("host ms", "host_ms"),
            ("wall ms", "wall_ms"),
            ("device ms", "device_ms"),
            ("CUDA calls", "cuda_calls"),
            ("device operations", "device_ops"),
        )
    ]
    rows += [[f"  {name} ms", *(s["classes_ms"][name] for s in steps.values())] for name in CLASSES]
    calls = dict.fromkeys(call for found in steps.values() for call in found["calls"])
    rows += [[f"  {call}", *(found["calls"].get(call, 0.0) for found in steps.values())] for call in calls]
    show_table("a decode step of so many requests", ["", *steps], rows)
    show_table("memory", ["", "GiB"], [[name, size] for name, size in report["memory_gib"].items()])
    for count, found in steps.items():
        title = f"longest device operations of a step of {count}"
        show_table(title, ["", "class", "ms", "times"], [list(kernel) for kernel in found["top"]])


def plot(report: Report, path: Path) -> None:
    """Device time by class, a bar for each number of requests."""
    steps = report["steps"]
    parts = {name: [found["classes_ms"][name] for found in steps.values()] for name in CLASSES}
    names = [f"{count} requests\n(host {found['host_ms']:.2f} ms)" for count, found in steps.items()]
    environment = report["environment"]
    title = f"Device time of a decode step, {environment['model']}, {environment['machine']}"
    stacked_bars(path, title, names, parts, "milliseconds")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--requests", type=int, nargs="+", metavar="N", help="default: 1 64 256 1024")
    parser.add_argument("--steps", type=int, metavar="N", help="steps that are timed (default: 64)")
    run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
