"""Where the time and the memory of a step go: steady decode steps, steps that mix prefill and decode, and prefill.

    python benchmarks/profile_step.py --json profile.json --plot profile.svg

Columns: decode steps of so many requests, each with a prompt of 128 ids; *mixed*, steps from the middle of W3, in which
some requests are prefilled while most decode; *prefill*, all of W4 (32,768 tokens). *Host* is the time that the
calling thread spends in `Engine.step` outside of its waits for the device, and *wall* that between steps, both without
a profiler, in the quietest of `--repeats` windows; *eager* says how many of its steps were no replay of a graph. Cores
that are shared with others run at half of their speed for seconds: *slowest* is the host in the other extreme, and
*loop* an empty loop of 100,000 turns in Python beside each. Device time is the sum of the durations that torch.profiler
gives the device's operations, ours by the file that defines them (replays are taken apart into their kernels); kernels
that overlap count whole, so it may exceed the wall time. *Calls* are those of the CUDA runtime and driver, replays
included.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import MAX_NUM_REQS, MODELS, Report, make_parser, open_llm, run_script, show_table
from plots import stacked_bars
from step_profile import CLASSES, device_profile, host_time, memory, quietest, start
from workloads import Job, Workload, workloads

from core_runner import LLM

Found = dict[str, Any]
Look = Callable[[LLM, int], Found]
PROFILED = 16  # most steps under the profiler


def look_at_decode(llm: LLM, look: Look, model: str, num_reqs: int, prompt_len: int, steps: int) -> Found:
    """Steady decode steps of one number of requests."""
    num_output = 2 * steps + PROFILED + 48  # the first ones decode while others are prefilled
    jobs = Workload("", num_reqs, prompt_len, num_output).jobs(MODELS[model]["vocab_size"])
    start(llm, jobs)
    while llm.engine.stats().waiting:
        llm.engine.step()
    return look_after(llm, look, steps, steps)


def look_at_mixed(llm: LLM, look: Look, jobs: Sequence[Job], skipped: int, steps: int) -> Found:
    """Steps from the middle of a workload whose requests come and go."""
    # The first time meets the shapes of its steps, and the second records those that came again.
    for _ in range(2):
        start(llm, jobs)
        for _ in range(skipped + steps + PROFILED):
            llm.engine.step()
        llm.engine.abort_all()
    start(llm, jobs)
    return look_after(llm, look, skipped, steps)


def look_at_prefill(llm: LLM, look: Look, jobs: Sequence[Job]) -> Found:
    """The whole of a workload, as one step."""

    def run() -> None:
        start(llm, jobs)
        while llm.engine.has_unfinished:
            llm.engine.step()

    for _ in range(2):
        run()
    return device_profile(run, 1) if look is profiled else host_time(run, 1, wait=True)


def look_after(llm: LLM, look: Look, skipped: int, steps: int) -> Found:
    """At the steps after the next `skipped` ones; then every request is given up."""
    for _ in range(skipped):
        llm.engine.step()
    found = look(llm, steps)
    llm.engine.abort_all()
    return found


def timed(llm: LLM, steps: int) -> Found:
    """The stopwatch's word on the next steps, and how many of them were no replay."""
    before = Counter(llm.stats().step_ways)
    found = host_time(llm.engine.step, steps)
    ways = Counter(llm.stats().step_ways) - before
    return found | {"eager_steps": sum(n for way, n in ways.items() if way.startswith("eager"))}


def profiled(llm: LLM, steps: int) -> Found:
    """The profiler's word on the next steps."""
    return device_profile(llm.engine.step, min(steps, PROFILED))


def measure(args: argparse.Namespace) -> Report:
    """Every column, on engines with slots for 256 requests, or for as many as a column wants.

    All is timed before anything is profiled: a profiler that has been in a process may slow its launches for good.
    """
    small = args.small
    counts = sorted(set(args.requests or ([1, 4, 8] if small else [1, 64, 256, 1024])))
    few = [count for count in counts if count <= MAX_NUM_REQS[small]]
    num_steps, prompt_len = args.steps or (2 if small else 64), 8 if small else 128
    works = {name: work.jobs(MODELS[args.model]["vocab_size"]) for name, work in workloads(small).items()}
    windows: dict[str, list[Found]] = {name: [] for name in (*map(str, counts), "mixed", "prefill")}
    held: dict[str, float] = {}
    for look, times in ((timed, args.repeats), (profiled, 1)):
        with open_llm(args.model, small) as llm:
            for _ in range(times):
                for count in few:
                    found = look_at_decode(llm, look, args.model, count, prompt_len, num_steps)
                    windows[f"{count}"].append(found)
                windows["mixed"].append(look_at_mixed(llm, look, works["W3"], 2 if small else 120, num_steps))
                windows["prefill"].append(look_at_prefill(llm, look, works["W4"]))
            held = memory(llm)
        for count in counts[len(few) :]:
            with open_llm(args.model, small, max_num_reqs=count, max_model_len=512) as llm:
                for _ in range(times):
                    found = look_at_decode(llm, look, args.model, count, prompt_len, num_steps)
                    windows[f"{count}"].append(found)
    steps = {name: profile | quietest(times) for name, (*times, profile) in windows.items()}
    return {"steps": steps, "memory_gib": held}


def show(report: Report) -> None:
    """Times, classes and calls, then the longest kernels of the largest batch."""
    steps = report["steps"]
    rows = [
        [label, *(found.get(key) for found in steps.values())]
        for label, key in (
            ("host ms", "host_ms"),
            ("  loop ms", "loop_ms"),
            ("host ms, slowest", "slowest_host_ms"),
            ("  loop ms", "slowest_loop_ms"),
            ("wall ms", "wall_ms"),
            ("device ms", "device_ms"),
            ("eager", "eager_steps"),
            ("CUDA calls", "cuda_calls"),
            ("device operations", "device_ops"),
        )
    ]
    rows += [[f"  {name} ms", *(s["classes_ms"][name] for s in steps.values())] for name in CLASSES]
    calls = dict.fromkeys(call for found in steps.values() for call in found["calls"])
    rows += [[f"  {call}", *(found["calls"].get(call, 0.0) for found in steps.values())] for call in calls]
    show_table("a step", ["", *steps], rows)
    show_table("memory", ["", "GiB"], [[name, size] for name, size in report["memory_gib"].items()])
    for count, found in steps.items():
        title = f"longest device operations, {count}"
        show_table(title, ["", "class", "ms", "times"], [list(kernel) for kernel in found["top"]])


def plot(report: Report, path: Path) -> None:
    """Each class's share of the device's time, a bar for each column."""
    steps = {name: found for name, found in report["steps"].items() if found["device_ms"]}
    parts = {
        name: [100 * found["classes_ms"][name] / found["device_ms"] for found in steps.values()]
        for name in CLASSES
    }
    names = [f"decode, {name}" if name.isdigit() else name for name in steps]
    labels = [f"{s['device_ms']:.2f} ms (wall {s['wall_ms']:.2f})" for s in steps.values()]
    environment = report["environment"]
    title = f"Device time of a step, {environment['model']}, {environment['machine']}"
    stacked_bars(path, title, names, parts, "% of the device's time", labels)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = make_parser(__file__, __doc__, repeats=5)
    parser.add_argument("--requests", type=int, nargs="+", metavar="N", help="default: 1 64 256 1024")
    parser.add_argument("--steps", type=int, metavar="N", help="steps that are timed (default: 64)")
    run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
