"""Host time of a step in steady decode, by part: `python benchmarks/host.py`.

Everything that Python does for a step is real: `LLM.generate`'s loop, engine, scheduler, the runner's checks, its
staging of changes, and what becomes of the tokens. Only the device is made up: it takes no time and samples id 7.
One step is in flight as in the asynchronous engine, and requests cross block edges in turn. Each figure is the mean
over one block's worth of steps, best of several; the thread's CPU time counts, so other work disturbs it little.

A second table is about requests that come and go: four times as many as run at once, 32 to 512 tokens in and 64
to 256 out, mean over all steps; `begin` is what one request costs before the first step.

A third one is about requests that come at once, as many as run, 128 tokens in and one out, in milliseconds of wall
time: making their options, checking the prompts, the rest until the first step is launched, and what comes after the
last tokens. The device waits meanwhile. Garbage is collected before each run, as in `offline.py`.

`--real` measures the runner as it is, on the GPU, with the embedded model; the wait for the device is left out.
`--profile N` adds the deterministic profiler's summary of N running requests.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from core_runner import LLM, SamplingParams
from core_runner.scheduling.output import IntArray, ModelRunnerOutput, SchedulerOutput
from model_states import CacheGroup, Caches, CacheTensor, InputBatch, ModelState, hookimpl, staged

PROMPT_LEN = 128
BLOCK_SIZE = 16
WARM_UP = 3 * BLOCK_SIZE  # steps before the first that counts
PARTS = ("schedule", "execute", "sample", "read", "update", "process")


class NothingState(ModelState):
    """One cache group of one number a token, and no model."""

    name = "nothing"
    api_version = 1
    architectures = ("NothingForCausalLM",)
    capabilities = frozenset({"chunked_prefill", "prefix_cache"})
    vocab_size = 32_000

    @hookimpl
    def cache_groups(self) -> list[CacheGroup]:
        """Ordinary blocks."""
        return [CacheGroup("nothing", BLOCK_SIZE, {"layer": {"cell": CacheTensor((1,), torch.int8)}})]

    @hookimpl
    def init_caches(self, caches: Caches) -> None:
        """Nobody reads them."""

    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """Never called: the device is made up."""
        raise AssertionError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Never called."""
        raise AssertionError


class Plugin:
    """Brings the state to `LLM(plugins=[...])`."""

    @hookimpl
    def register_model_states(self) -> list[type[ModelState]]:
        """The one state."""
        return [NothingState]


class InstantDevice:
    """Takes the runner's place behind its checks and its staging: every row that samples gets id 7 at once."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._output: Output | None = None

    def execute_model(self, step: SchedulerOutput) -> None:
        """Check the step and stage its changes."""
        self._runner.inputs.validate(step)
        self._runner._apply_changes(step)
        self._runner.inputs.begin(step)
        samples = step.num_computed_tokens + step.num_scheduled_tokens >= self._prefill_len(step)
        self._output = Output(partial(_one_token_each, samples.astype(np.int32))) if step.num_reqs else None

    def sample_tokens(self) -> Output | None:
        """What can be read at once."""
        return self._output

    def _prefill_len(self, step: SchedulerOutput) -> IntArray:
        return self._runner.request_states.prefill_len_np[step.slots]


class Output(NamedTuple):
    """A step's tokens, as the engine reads them."""

    get_output: Callable[[], ModelRunnerOutput]


def _one_token_each(samples: IntArray) -> ModelRunnerOutput:
    num_reqs = len(samples)
    ids, zeros = np.full((num_reqs, 1), 7, np.int32), np.zeros(num_reqs, np.int32)
    return ModelRunnerOutput(ids, samples, zeros, np.zeros(num_reqs, np.bool_))


class Stopwatch:
    """CPU seconds of this thread by part, and what passed between the beginnings of steps."""

    def __init__(self, warm_up: int = 0) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.begins: list[tuple[float, dict[str, float]]] = []
        self.warm_up = warm_up

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the time of `owner.method` as `part`."""
        setattr(owner, method, self.timed(getattr(owner, method), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`function`, its time counted as `part`."""

        def run(*args: Any) -> Any:
            before = time.thread_time()
            result = function(*args)
            self.spent[part] += time.thread_time() - before
            return result

        return run

    def watch_steps(self, engine: Any) -> None:
        """Note the time at which each step begins."""
        step = engine.step

        def run() -> Any:
            self.begins.append((time.thread_time(), dict(self.spent)))
            return step()

        engine.step = run

    def best(self, waits: bool) -> dict[str, float]:
        """Microseconds per step by part in the best run of BLOCK_SIZE steps; with `waits`, reading is left out."""
        firsts = range(self.warm_up, len(self.begins) - BLOCK_SIZE - 2, BLOCK_SIZE)
        runs = [self.mean(first, first + BLOCK_SIZE, waits) for first in firsts]
        return min(runs, key=lambda run: run["total"])

    def mean(self, first: int, last: int, waits: bool) -> dict[str, float]:
        """Microseconds per step by part over steps [first, last)."""
        (begin, before), (end, after) = self.begins[first], self.begins[last]
        parts = {part: (after[part] - before[part]) / (last - first) * 1e6 for part in PARTS}
        total = (end - begin) / (last - first) * 1e6
        if waits:
            total -= parts.pop("read")
        return {**parts, "loop": total - sum(parts.values()), "total": total}


def make_llm(num_reqs: int, max_model_len: int, real: bool, directory: Path, **options: Any) -> LLM:
    """An engine with room for `num_reqs` requests of `max_model_len` tokens."""
    options = {
        "max_num_reqs": num_reqs,
        "max_num_batched_tokens": 8192,
        "block_size": BLOCK_SIZE,
        "num_blocks": 2 + 2 * num_reqs * -(-max_model_len // BLOCK_SIZE),
        **options,
    }
    if real:
        return LLM(device="cuda", dtype="bfloat16", max_model_len=max_model_len, **options)
    config = {"architectures": ["NothingForCausalLM"], "model_type": "nothing", "vocab_size": 32_000}
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": max_model_len}))
    llm = LLM(str(directory), plugins=[Plugin()], device="cpu", **options)
    device = InstantDevice(llm.engine.runner)
    llm.engine.runner.execute_model = device.execute_model
    llm.engine.runner.sample_tokens = device.sample_tokens
    return llm


def watched(llm: LLM, warm_up: int = 0) -> Stopwatch:
    """Time everything that a step goes through."""
    watch, engine = Stopwatch(warm_up), llm.engine
    watch.watch_steps(engine)
    watch.watch(engine.scheduler, "schedule", "schedule")
    watch.watch(engine.scheduler, "update", "update")
    watch.watch(engine.runner, "execute_model", "execute")
    watch.watch(engine.runner, "sample_tokens", "sample")
    watch.watch(llm._processor, "process", "process")
    sample_tokens = engine.runner.sample_tokens

    def sample() -> Any:
        output = sample_tokens()
        return None if output is None else Output(watch.timed(output.get_output, "read"))

    engine.runner.sample_tokens = sample
    return watch


def generate(llm: LLM, lengths: list[tuple[int, int]]) -> None:
    """Run requests of random ids with these lengths (in, out)."""
    draw = np.random.default_rng(len(lengths))
    vocab_size = llm.engine.runner.model_state.vocab_size
    prompts = [draw.integers(10, vocab_size, num_in).tolist() for num_in, _ in lengths]
    params = [
        SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, seed=0) for _, num_out in lengths
    ]
    llm.generate(prompts, params)


def measure_steady(num_reqs: int, num_runs: int, real: bool, **options: Any) -> dict[str, float]:
    """Microseconds per step by part while the same requests decode, which cross block edges in turn."""
    # Prefills come first: their steps do not count, nor do the first ones that decode.
    num_prefill = -(-num_reqs * (PROMPT_LEN + BLOCK_SIZE) // 8192)
    num_steps = WARM_UP + (num_runs + 1) * BLOCK_SIZE + num_prefill
    with tempfile.TemporaryDirectory() as directory:
        llm = make_llm(num_reqs, PROMPT_LEN + BLOCK_SIZE + num_steps, real, Path(directory), **options)
        watch = watched(llm, WARM_UP + num_prefill)
        generate(llm, [(PROMPT_LEN + idx % BLOCK_SIZE, num_steps) for idx in range(num_reqs)])
        llm.close()
    return watch.best(waits=real)


def measure_traffic(num_reqs: int, real: bool, **options: Any) -> dict[str, float]:
    """Microseconds per step by part while requests come and go."""
    draw = random.Random(1234)
    lengths = [(draw.randint(32, 512), draw.randint(64, 256)) for _ in range(4 * num_reqs)]
    with tempfile.TemporaryDirectory() as directory:
        llm = make_llm(num_reqs, 768, real, Path(directory), **options)
        generate(llm, lengths[:num_reqs])
        watch = watched(llm)
        before = time.thread_time()
        generate(llm, lengths)
        begin = (watch.begins[0][0] - before) / len(lengths) * 1e6
        llm.close()
    return {"begin": begin, **watch.mean(0, len(watch.begins) - 1, waits=real)}


def measure_burst(num_reqs: int, num_runs: int, real: bool, **options: Any) -> dict[str, float]:
    """Milliseconds in which the device has nothing to do around one burst of requests, the best run of each part."""
    parts: dict[str, list[float]] = {"options": [], "checks": [], "launch": [], "after": []}
    draw = np.random.default_rng(num_reqs)
    with tempfile.TemporaryDirectory() as directory:
        llm = make_llm(num_reqs, PROMPT_LEN + 1, real, Path(directory), **options)
        times = {name: Clock(owner, name) for owner, name in _watched_in_burst(llm)}
        vocab_size = llm.engine.runner.model_state.vocab_size
        for run in range(num_runs + 3):
            prompts = draw.integers(10, vocab_size, (num_reqs, PROMPT_LEN)).tolist()
            gc.collect()
            begin = time.perf_counter()
            params = [SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True) for _ in range(num_reqs)]
            made = time.perf_counter()
            llm.generate(prompts, params)
            end = time.perf_counter()
            # The first runs compile and record.
            if run >= 3:
                checked = times["_make_jobs"].ends[0]
                launched, read = times["sample_tokens"].ends[0], times["update"].begins[-1]
                found = (made - begin, checked - made, launched - checked, end - read)
                for values, seconds in zip(parts.values(), found, strict=True):
                    values.append(1e3 * seconds)
            for clock in times.values():
                clock.clear()
        llm.close()
    return {name: min(values) for name, values in parts.items()}


def _watched_in_burst(llm: LLM) -> list[tuple[Any, str]]:
    return [
        (llm, "_make_jobs"),
        (llm.engine.runner, "sample_tokens"),
        (llm.engine.scheduler, "update"),
    ]


class Clock:
    """When each call of a method began and ended."""

    def __init__(self, owner: Any, method: str) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        self._function = getattr(owner, method)
        setattr(owner, method, self._run)

    def clear(self) -> None:
        """Forget the calls so far."""
        self.begins.clear()
        self.ends.clear()

    def _run(self, *args: Any) -> Any:
        self.begins.append(time.perf_counter())
        result = self._function(*args)
        self.ends.append(time.perf_counter())
        return result


def profile(num_reqs: int, real: bool, num_lines: int) -> None:
    """Print the deterministic profiler's summary of a generation; it makes small functions look slower."""
    num_steps = 300
    with tempfile.TemporaryDirectory() as directory:
        llm = make_llm(num_reqs, PROMPT_LEN + BLOCK_SIZE + num_steps, real, Path(directory))
        profiler = cProfile.Profile()
        profiler.runcall(
            generate, llm, [(PROMPT_LEN + idx % BLOCK_SIZE, num_steps) for idx in range(num_reqs)]
        )
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(num_lines)


def main() -> None:
    """Print a table over numbers of running requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 64, 256, 1024])
    parser.add_argument("--runs", type=int, default=12, help="runs of 16 steps; the best one counts")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--profile", type=int, metavar="N")
    parser.add_argument("--no-prefix-cache", action="store_true")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()  # it knows no model type "nothing"
    if not args.real:
        # The device's part of a staged write.
        staged.staged_write = lambda *args: None
        staged.HostToDevice.copy = lambda *args: None  # type: ignore[method-assign]
    options = {"enable_prefix_caching": False} if args.no_prefix_cache else {}
    print(f"host microseconds per step, best of {args.runs} runs of {BLOCK_SIZE} steps")
    for num_reqs in args.requests:
        show(
            num_reqs, measure_steady(num_reqs, args.runs, args.real, **options), num_reqs == args.requests[0]
        )
    print("requests that come and go")
    for num_reqs in args.requests:
        show(num_reqs, measure_traffic(num_reqs, args.real, **options), num_reqs == args.requests[0])
    print("requests that come at once, milliseconds")
    for num_reqs in args.requests:
        show(
            num_reqs,
            measure_burst(num_reqs, args.runs, args.real, **options),
            num_reqs == args.requests[0],
            3,
        )
    if args.profile:
        profile(args.profile, args.real, 40)


def show(num_reqs: int, times: dict[str, float], with_names: bool, digits: int = 1) -> None:
    """Print one row of a table."""
    if with_names:
        print(f"{'running':>8}" + "".join(f"{name:>10}" for name in times))
    print(f"{num_reqs:>8}" + "".join(f"{value:>10.{digits}f}" for value in times.values()), flush=True)


if __name__ == "__main__":
    main()
