"""Requests that arrive at a rate, served as a server would: latency against load.

    python benchmarks/arrivals.py --rates 50 100 200 --json arrivals.json --plot arrivals.svg

W3's requests (32 to 512 in, 64 to 256 out) arrive as a Poisson process of a fixed seed. One loop adds to the engine
what has arrived and runs `Engine.step`. TTFT is the time from a request's arrival to its first token, TPOT the time
per token after the first; both are given as p50, p95 and p99 over requests, with the output tokens a second from the
first arrival to the last token. Each rate runs twice before: at another rate steps have other shapes, which are
recorded when they come again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import MODELS, Report, greedy, make_parser, open_llm, run_script, show_table
from plots import line_panels
from workloads import SEED, Job, Workload

from core_runner import LLM
from core_runner.request import Request

PERCENTILES = (50, 95, 99)
WARM_UPS = 2


class Times(NamedTuple):
    """Seconds from the first arrival on: when a request came, and when its first and its last token did."""

    arrival: float
    first: float
    last: float
    num_output: int


def poisson_arrivals(count: int, rate: float) -> list[float]:
    """Seconds at which requests arrive, the first one at 0: gaps are exponential, always the same for a rate."""
    draw = random.Random(SEED)
    arrivals, now = [], 0.0
    for _ in range(count):
        arrivals.append(now)
        now += draw.expovariate(rate)
    return arrivals


def serve(llm: LLM, jobs: Sequence[Job], arrivals: Sequence[float]) -> list[Times]:
    """Run the jobs as they arrive; tokens count when `Engine.step` hands them out."""
    engine = llm.engine
    first: dict[str, float] = {}
    finished: dict[str, float] = {}
    started, index = time.perf_counter(), 0
    while len(finished) < len(jobs):
        now = time.perf_counter() - started
        while index < len(jobs) and arrivals[index] <= now:
            job = jobs[index]
            engine.add_request(Request(str(index), job.prompt, greedy(job.num_output), seed=index))
            index += 1
        if not engine.has_unfinished:
            time.sleep(max(arrivals[index] - now, 0.0))
            continue
        updates = engine.step()
        now = time.perf_counter() - started
        for update in updates:
            first.setdefault(update.request.req_id, now)
            if update.finish_reason is not None:
                finished[update.request.req_id] = now
    engine.settle()
    return [Times(arrivals[i], first[str(i)], finished[str(i)], job.num_output) for i, job in enumerate(jobs)]


def summarize(times: Sequence[Times]) -> dict[str, Any]:
    """Percentiles in milliseconds, and the rate of output tokens."""
    values = {
        "ttft_ms": [1000 * (t.first - t.arrival) for t in times],
        "tpot_ms": [1000 * (t.last - t.first) / max(t.num_output - 1, 1) for t in times],
    }
    tokens, seconds = sum(t.num_output for t in times), max(t.last for t in times)
    return {
        "requests": len(times),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        **{
            name: {f"p{p}": float(np.percentile(series, p)) for p in PERCENTILES}
            for name, series in values.items()
        },
    }


def measure(args: argparse.Namespace) -> Report:
    """Every rate, each for about `--seconds`."""
    rates = args.rates or ([50.0, 200.0] if args.small else [25.0, 50.0, 100.0, 150.0, 200.0, 250.0])
    lengths = ((3, 40), (2, 9)) if args.small else ((32, 512), (64, 256))
    results = []
    with open_llm(args.model, args.small) as llm:
        for rate in rates:
            count = max(int(rate * args.seconds), 2)
            jobs = Workload("", count, *lengths).jobs(MODELS[args.model]["vocab_size"])
            arrivals = poisson_arrivals(count, rate)
            for _ in range(WARM_UPS):
                serve(llm, jobs, arrivals)
            before = Counter(llm.stats().step_ways)
            found = summarize(serve(llm, jobs, arrivals))
            ways = Counter(llm.stats().step_ways) - before
            results.append({"rate": rate, **found, "steps": dict(ways)})
            print(
                f"{rate:g} requests/s: {found['tokens_per_s']:,.0f} tokens/s, steps {dict(ways)}", flush=True
            )
    return {"rates": results}


def show(report: Report) -> None:
    """A row for each rate."""
    headers = ["requests/s", "output tok/s"]
    headers += [f"{name} p{p}" for name in ("TTFT", "TPOT") for p in PERCENTILES]
    rows = [
        [
            f"{found['rate']:g}",
            found["tokens_per_s"],
            *(found[name][f"p{p}"] for name in ("ttft_ms", "tpot_ms") for p in PERCENTILES),
        ]
        for found in report["rates"]
    ]
    show_table("TTFT and TPOT in milliseconds", headers, rows)


def plot(report: Report, path: Path) -> None:
    """Latencies and throughput over the rate."""
    found = report["rates"]
    panels = {
        label: {f"p{p}": [f[name][f"p{p}"] for f in found] for p in PERCENTILES}
        for label, name in (("time to first token, ms", "ttft_ms"), ("time per output token, ms", "tpot_ms"))
    }
    panels["output tokens a second"] = {"served": [f["tokens_per_s"] for f in found]}
    environment = report["environment"]
    title = f"Requests arriving at a rate, {environment['model']}, {environment['machine']}"
    line_panels(path, title, [f["rate"] for f in found], panels, "requests a second")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--rates", type=float, nargs="+", metavar="R", help="requests a second")
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals at each rate (default: 6)")
    run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
