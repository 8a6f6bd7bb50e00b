"""Offline speed of a real model's shape with random weights: requests that are all there at the start.

    python benchmarks/offline.py --peers --json offline.json --plot offline.svg

Workloads W1 to W4 (`workloads.py`): greedy, end ids ignored, no prefix hits, prompts as token ids, at most 8,192
tokens a step and 256 requests in a batch. W1 is also sampled at temperature 1. Each figure is the median of
`--repeats` runs after such that compile and record all that the timed ones need. `--peers` runs
transformers' `generate` and continuous batching, and vLLM where it is installed, after ours in the same process;
`--output-tokens` makes the workloads short enough for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import MODELS, Report, make_parser, median, run_script, show_table, timed
from peers import Engine, Opener, open_core_runner, open_generate, peers
from plots import barh_panels
from workloads import Job, Workload, shortened, workloads

OURS = "core-runner"


def measure_one(engine: Engine, jobs: Sequence[Job], temperature: float, repeats: int) -> dict[str, Any]:
    """Seconds of each timed run; every run must give the tokens that were asked for."""
    wanted = sum(job.num_output for job in jobs)
    for _ in range(engine.warmups):
        engine.run(shortened(jobs, engine.warmup_tokens), temperature)
    tokens: list[int] = []
    seconds = timed(lambda: tokens.append(engine.run(jobs, temperature)), repeats)
    if set(tokens) != {wanted}:
        raise RuntimeError(f"{wanted} tokens were asked for, the runs gave {tokens}")
    return {"tokens": wanted, "prompt_tokens": sum(len(job.prompt) for job in jobs), "seconds": seconds}


def measure_engine(
    name: str, opener: Opener, chosen: Mapping[str, Workload], repeats: int, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One engine on every workload that it can run, and what it says of itself."""
    results = []
    with opener(args.model, args.small) as engine:
        for workload, work in chosen.items():
            if opener is open_generate and not isinstance(work.prompt_len, int):
                continue  # one rectangle for all rows, so it would compute padding
            for temperature in (0.0, 1.0) if (name, workload) == (OURS, "W1") else (0.0,):
                jobs = shortened(work.jobs(MODELS[args.model]["vocab_size"]), args.output_tokens)
                result = {"engine": name, "workload": workload, "temperature": temperature}
                result |= measure_one(engine, jobs, temperature, repeats)
                results.append(result | speed(work, result))
                print(f"{row_of(result)}, {workload}: {results[-1]['speed']:,.1f} {work.unit}", flush=True)
        return results, engine.details()


def measure(args: argparse.Namespace) -> Report:
    """Every engine, one after another."""
    chosen = {name: work for name, work in workloads(args.small).items() if name in args.workloads}
    results, details = [], {}
    engines = {OURS: open_core_runner, **(peers() if args.peers or args.engines else {})}
    for name in args.engines or engines:
        opener = engines[name]
        repeats = args.repeats if name == OURS else args.peer_repeats
        found, details[name] = measure_engine(name, opener, chosen, repeats, args)
        results += found
    limit = f", at most {args.output_tokens} of them" if args.output_tokens else ""
    described = {name: [work.what + limit, work.unit] for name, work in chosen.items()}
    return {"workloads": described, "results": results, "engines": details}


def speed(work: Workload, result: dict[str, Any]) -> dict[str, Any]:
    """Output tokens a second, or milliseconds in all, of the median run."""
    seconds = median(result["seconds"])
    return {
        "speed": result["tokens"] / seconds if work.unit == "tok/s" else 1000 * seconds,
        "unit": work.unit,
    }


def row_of(result: dict[str, Any]) -> str:
    """The row that a result belongs to."""
    return result["engine"] + (f", temperature {result['temperature']:g}" if result["temperature"] else "")


def _by_row(report: Report) -> dict[str, dict[str, float]]:
    """Row's name -> workload -> speed."""
    rows: dict[str, dict[str, float]] = {}
    for result in report["results"]:
        rows.setdefault(row_of(result), {})[result["workload"]] = result["speed"]
    return rows


def show(report: Report) -> None:
    """Engines down, workloads across."""
    units = {name: unit for name, (_, unit) in report["workloads"].items()}
    for name, (what, unit) in report["workloads"].items():
        print(f"  {name}: {what}, {'output tokens a second' if unit == 'tok/s' else 'milliseconds'}")
    rows = _by_row(report)
    table = [[label, *(speeds.get(name) for name in units)] for label, speeds in rows.items()]
    show_table("", ["", *(f"{name} {unit}" for name, unit in units.items())], table)
    for engine, details in report["engines"].items():
        print(f"{engine}: {details}")


def plot(report: Report, path: Path) -> None:
    """A panel for each workload, a bar for each engine."""
    rows = _by_row(report)
    panels = {
        f"{name}: {what}\n({unit}{', less is better' if unit == 'ms' else ''})": {
            label: speeds[name] for label, speeds in rows.items() if name in speeds
        }
        for name, (what, unit) in report["workloads"].items()
    }
    environment = report["environment"]
    barh_panels(path, f"{environment['model']}, {environment['machine']}", panels, "")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W4"], metavar="W")
    parser.add_argument("--peers", action="store_true", help="run the peers that are installed, too")
    parser.add_argument(
        "--engines", nargs="+", choices=[OURS, *peers()], metavar="NAME", help="these alone, in this order"
    )
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument(
        "--output-tokens", type=int, metavar="N", help="no request gives more, of whichever engine"
    )
    run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
