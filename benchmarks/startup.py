"""How long a process takes until it generates: with an empty cache of compiled kernels, and with a filled one.

    python benchmarks/startup.py --json startup.json

Each run is a process of its own: *first* finds neither compiled kernels nor the bytecode of any Python module, *cold*
has the bytecode, as an installation by pip leaves it, and *warm* has both; of `--repeats` warm ones the table has the
median by *ready*. Those in front see all that is installed here, of which transformers looks at everything and imports
some; those called *own* see what core-runner requires, directly or not, and nothing else. *Ready* is `LLM(...)` with
`record_graphs_at_start`; *first tokens* is the first batch of full width after it (256 requests, 128 in, 8 out), which
compiles and records what is left, and *again* is the same batch once more. Within both, *imports* is the time in
modules that are first needed there, *weights* that in the model's loader, *kernels* that of Triton's compiler (or of
its cache), and *graphs* that of recordings.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_STARTED = time.perf_counter()  # before torch is imported

from common import MODELS, Report, make_parser, open_llm, run_script, show_table, timed  # noqa: E402
from own_site import link_requirements  # noqa: E402
from peers import jobs_runner  # noqa: E402
from plots import stacked_bars  # noqa: E402
from workloads import Workload  # noqa: E402

import core_runner.runner as runner_module  # noqa: E402
from core_runner.step_launcher import StepLauncher  # noqa: E402
from model_states.rewrites import fuse  # noqa: E402

PARTS = ("imports", "weights", "kernels", "graphs", "rest")
KERNELS = "kernels"  # folder of Triton's cache
WIDE = {False: Workload("", 256, 128, 8), True: Workload("", 6, 12, 3)}


class Phases:
    """Seconds of each part so far; what runs inside another part counts for itself alone."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS[:-1], 0.0)
        self.num_graphs = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block, without what other parts take within it."""
        before, started = sum(self.seconds.values()), time.perf_counter()
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - before
            self.seconds[name] += time.perf_counter() - started - inner

    def watch(self) -> None:
        """Time modules, the loader, Triton's compiler and recordings, to the end of the process."""
        runner_module.load_model_state = self._timed("weights", runner_module.load_model_state)
        execute = SourceFileLoader.exec_module

        def timed_execute(loader: SourceFileLoader, module: ModuleType) -> None:
            with self.part("imports") if _is_main_thread() else nullcontext():
                execute(loader, module)

        SourceFileLoader.exec_module = timed_execute  # type: ignore[method-assign]
        self._watch_triton()
        self._watch_graphs()

    def _watch_triton(self) -> None:
        try:
            from triton import knobs
        except ImportError:
            return

        def compiled(*, times: Any, **_: Any) -> None:
            if _is_main_thread():
                self.seconds["kernels"] += times.total / 1e6  # it counts microseconds

        knobs.compilation.listener = compiled
        # What is compiled ahead, by other processes, counts with all that it takes to know what that is.
        for owner, name in ((StepLauncher, "compile_kernels"), (fuse, "rehearse")):
            setattr(owner, name, self._timed("kernels", getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.part(part):
                return function(*args)

        return call

    def _watch_graphs(self) -> None:
        import torch

        begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
        recording: list[Any] = []

        def timed_begin(*args: Any, **kwargs: Any) -> None:
            recording.append(self.part("graphs"))
            recording[-1].__enter__()
            begin(*args, **kwargs)

        def timed_end(*args: Any, **kwargs: Any) -> None:
            end(*args, **kwargs)
            recording.pop().__exit__(None, None, None)
            self.num_graphs += 1

        torch.cuda.CUDAGraph.capture_begin = timed_begin  # type: ignore[method-assign]
        torch.cuda.CUDAGraph.capture_end = timed_end  # type: ignore[method-assign]


def _num_kept_kernels() -> int:
    """Kernels in Triton's cache: other processes may have compiled them."""
    cache = os.environ.get("TRITON_CACHE_DIR")
    return len(list(Path(cache).rglob("*.ttir"))) if cache else 0


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def measure_here(args: argparse.Namespace) -> dict[str, Any]:
    """This process's own start, from the import of torch on."""
    phases, num_kept = Phases(), _num_kept_kernels()
    phases.watch()
    imports = time.perf_counter() - _STARTED
    started = time.perf_counter()
    with open_llm(args.model, args.small, record_graphs_at_start=True) as llm:
        ready = time.perf_counter() - started
        at_ready = dict(phases.seconds)
        jobs = WIDE[args.small].jobs(MODELS[args.model]["vocab_size"])
        run = jobs_runner(llm)
        first, again = (timed(lambda: run(jobs, 0.0), 1)[0] for _ in range(2))
    rest = ready + first - sum(phases.seconds.values())
    return {
        "imports_s": imports,
        "ready_s": ready,
        "first_tokens_s": first,
        "again_s": again,
        "ready_parts_s": {**at_ready, "rest": ready - sum(at_ready.values())},
        "parts_s": {**phases.seconds, "imports": imports + phases.seconds["imports"], "rest": rest},
        "kernels_compiled": _num_kept_kernels() - num_kept,
        "graphs_recorded": phases.num_graphs,
    }


def measure_process(args: argparse.Namespace, cache: Path, site: Path | None) -> dict[str, Any]:
    """The same in a new process, with what Triton and Python compile kept in the given folder alone.

    What an environment keeps of Python's bytecode would count otherwise: an installer may leave none, and
    PYTHONDONTWRITEBYTECODE has half of the modules compiled in every process. site: the only folder with packages, if
    not all that is installed.
    """
    alone = ["-S"] if site else []
    command = [sys.executable, *alone, __file__, "--here", "--model", args.model, *["--small"][: args.small]]
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache / KERNELS),
        "PYTHONPYCACHEPREFIX": str(cache / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": str(site or os.pathsep.join(filter(None, sys.path))),
    }
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def measure_starts(args: argparse.Namespace, site: Path | None) -> dict[str, Any]:
    """A first, a cold and several warm starts, one after another; of the warm ones that of median length."""
    starts, prefix = {}, "own " if site else ""
    with tempfile.TemporaryDirectory() as cache:
        for name, repeats in (("first", 1), ("cold", 1), ("warm", args.repeats)):
            if name == "cold":
                shutil.rmtree(Path(cache, KERNELS), ignore_errors=True)
            found = [measure_process(args, Path(cache), site) for _ in range(repeats)]
            found.sort(key=lambda start: start["ready_s"])
            all_ready = [start["ready_s"] for start in found]
            starts[prefix + name] = {**found[(repeats - 1) // 2], "all_ready_s": all_ready}
            seconds = ", ".join(f"{ready:.1f}" for ready in all_ready)
            print(f"{prefix}{name}: ready after {seconds} s", flush=True)
    return starts


def _packages() -> list[str]:
    """What core-runner's distribution consists of."""
    points = importlib.metadata.distribution("core-runner").entry_points
    modules = {point.module.partition(".")[0] for point in points}
    return sorted({"core_runner", "model_states"} | modules)


def measure(args: argparse.Namespace) -> Report:
    """Starts in each of the environments."""
    starts: dict[str, Any] = {}
    if args.only != "own":
        starts |= measure_starts(args, None)
    if args.only != "whole":
        with tempfile.TemporaryDirectory() as site:
            link_requirements("core-runner", _packages(), Path(site))
            starts |= measure_starts(args, Path(site))
    return {"starts": starts}


def show(report: Report) -> None:
    """The starts beside each other."""
    starts = report["starts"]
    rows = [[name, *(start[name] for start in starts.values())] for name in ("imports_s", "ready_s")]
    rows += [[f"  of it {part}", *(s["ready_parts_s"][part] for s in starts.values())] for part in PARTS]
    others = ("first_tokens_s", "again_s", "kernels_compiled", "graphs_recorded")
    rows += [[name, *(start[name] for start in starts.values())] for name in others]
    show_table("seconds", ["", *starts], rows)


def plot(report: Report, path: Path) -> None:
    """The parts of a start up to the end of the first batch."""
    starts = report["starts"]
    parts = {part: [start["parts_s"][part] for start in starts.values()] for part in PARTS}
    environment = report["environment"]
    title = f"From python to the first batch, {environment['model']}, {environment['machine']}"
    stacked_bars(path, title, [f"{name} start" for name in starts], parts, "seconds")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was asked for; `--here` measures this process and prints JSON."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--only", choices=["whole", "own"], help="environment (default: one after the other)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        print(json.dumps(measure_here(args)))
    else:
        run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
