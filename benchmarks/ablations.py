"""What each idea brings: the same workloads without it, in one run.

    python benchmarks/ablations.py --json ablations.json --plot ablations.svg

W1 and W3 of `workloads.py`, greedy. Every variant (`ablation_variants.py`) is the whole engine without one idea, or
without several, and generates exactly the same number of tokens. A variant that records graphs first runs the
workload twice whole; one without warms up on 8 tokens each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ablation_variants import VARIANTS, Variant
from common import MODELS, Report, make_parser, median, open_llm, run_script, show_table, timed
from peers import jobs_runner
from plots import barh_panels
from workloads import shortened, workloads

FULL = "everything"


def measure_variant(variant: Variant, workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens a second of one variant on a workload."""
    jobs = workloads(args.small)[workload].jobs(MODELS[args.model]["vocab_size"])
    wanted = sum(job.num_output for job in jobs)
    tokens: list[int] = []
    with variant.applied(), open_llm(args.model, args.small, **variant.options) as llm:
        run = jobs_runner(llm)
        if variant.has_graphs:
            run(jobs, 0.0)
            run(jobs, 0.0)
        else:
            run(shortened(jobs[:256], 8), 0.0)
        seconds = timed(lambda: tokens.append(run(jobs, 0.0)), args.repeats)
        ways = dict(llm.stats().step_ways)
    if set(tokens) != {wanted}:
        raise RuntimeError(f"{wanted} tokens were asked for, the runs gave {tokens}")
    return {"tokens": wanted, "seconds": seconds, "speed": wanted / median(seconds), "steps": ways}


def measure(args: argparse.Namespace) -> Report:
    """Every variant that this version supports, on one workload after another."""
    chosen = {name: VARIANTS[name] for name in args.variants or VARIANTS}
    supported = {name: variant for name, variant in chosen.items() if variant.is_supported}
    for name in chosen.keys() - supported.keys():
        print(f"{name}: this version has no such option")
    results: dict[str, dict[str, Any]] = {name: {} for name in supported}
    started = time.monotonic()
    for workload, (name, variant) in product(args.workloads, supported.items()):
        if args.budget is not None and time.monotonic() - started > args.budget:
            print(f"{name}, {workload}: left out, since {args.budget:g} s are over", flush=True)
            continue
        found = results[name][workload] = measure_variant(variant, workload, args)
        print(f"{name}, {workload}: {found['speed']:,.0f} tok/s", flush=True)
    return {"workloads": list(args.workloads), "variants": results}


def show(report: Report) -> None:
    """Speeds, and each as a share of the whole engine's."""
    variants, names = report["variants"], report["workloads"]
    full = variants.get(FULL, {})
    rows = []
    for variant, found in variants.items():
        row: list[Any] = [variant]
        for name in names:
            speed, whole = (each.get(name, {}).get("speed") for each in (found, full))
            row += [speed, f"{100 * speed / whole:.0f} %" if speed and whole else None]
        rows.append(row)
    show_table("", ["", *(text for name in names for text in (f"{name} tok/s", "of all"))], rows)


def plot(report: Report, path: Path) -> None:
    """A panel for each workload, a bar for each variant."""
    panels = {
        f"{name}, output tokens a second": {
            variant: found[name]["speed"] for variant, found in report["variants"].items() if name in found
        }
        for name in report["workloads"]
    }
    environment = report["environment"]
    barh_panels(path, f"What each idea brings, {environment['model']}, {environment['machine']}", panels, "")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W3"], metavar="W")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="default: all")
    parser.add_argument("--budget", type=float, metavar="S", help="begin nothing after so many seconds")
    run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
