"""Host cost of one scheduler step in steady decode: `python benchmarks/scheduler.py`.

Every request decodes one token a step; outputs are made up, and one step is in flight as in the asynchronous
engine. "streamed": every token is reported, as for a stream or stop strings, and not the end alone. Each figure is
the best of several runs, a run being the mean over one block's worth of steps, so that each running request takes
exactly one new block in a run. CPU time is counted, so other work on the machine disturbs it little.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import numpy as np

from core_runner.request import Request
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import ModelRunnerOutput
from core_runner.scheduling.scheduler import GroupSpec, ScheduledStep, Scheduler, SchedulerConfig

PROMPT_LEN = 128
BLOCK_SIZE = 16


def fake_output(step: ScheduledStep) -> ModelRunnerOutput:
    """One token (id 7) for every row that samples."""
    num_reqs = step.output.num_reqs
    return ModelRunnerOutput(
        sampled_token_ids=np.full((num_reqs, 1), 7, np.int32),
        num_sampled=step.samples.astype(np.int32),
        num_rejected=np.zeros(num_reqs, np.int32),
        failed=np.zeros(num_reqs, np.bool_),
    )


def start(
    num_reqs: int, num_steps: int, group: GroupSpec, enable_prefix_caching: bool, reports_tokens: bool
) -> Scheduler:
    """A scheduler whose requests have all been prefilled, of lengths that let them grow in turn."""
    max_model_len = PROMPT_LEN + BLOCK_SIZE + num_steps + 8
    config = SchedulerConfig(
        max_num_reqs=num_reqs,
        max_num_batched_tokens=1 << 20,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
    )
    num_blocks = 1 + num_reqs * (-(-max_model_len // BLOCK_SIZE) + 1)
    scheduler = Scheduler(config, [group], [num_blocks], eos_token_ids=[2])
    params = SamplingParams(max_tokens=None)
    rng = np.random.default_rng(0)
    for idx in range(num_reqs):
        prompt = rng.integers(10, 30_000, PROMPT_LEN + idx % BLOCK_SIZE)
        request = Request(f"r{idx}", prompt.astype(np.int32), params, reports_tokens=reports_tokens)
        scheduler.add_request(request)
    return scheduler


def measure(scheduler: Scheduler, num_runs: int) -> tuple[float, float]:
    """Best mean microseconds of `schedule` and `update`."""
    in_flight: deque[ScheduledStep] = deque()
    best = [float("inf"), float("inf")]
    for _ in range(num_runs):
        spent = [0.0, 0.0]
        for _ in range(BLOCK_SIZE):
            before = time.process_time()
            step = scheduler.schedule()
            spent[0] += time.process_time() - before
            assert step is not None
            in_flight.append(step)
            if len(in_flight) > 1:
                oldest = in_flight.popleft()
                output = fake_output(oldest)
                before = time.process_time()
                scheduler.update(oldest, output)
                spent[1] += time.process_time() - before
        best = [min(b, s / BLOCK_SIZE) for b, s in zip(best, spent, strict=True)]
    return best[0] * 1e6, best[1] * 1e6


def main() -> None:
    """Print a table over numbers of running requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs of 16 steps; the best one counts")
    num_runs = parser.parse_args().runs
    cases = [
        ("no prefix cache", GroupSpec(BLOCK_SIZE), False, False),
        ("prefix cache", GroupSpec(BLOCK_SIZE), True, False),
        ("window 128, prefix cache", GroupSpec(BLOCK_SIZE, 128), True, False),
        ("prefix cache, streamed", GroupSpec(BLOCK_SIZE), True, True),
    ]
    print(f"best of {num_runs} runs of {BLOCK_SIZE} steps, CPU microseconds per step")
    print(f"{'running':>8} {'case':<26} {'schedule':>9} {'update':>9} {'sum':>9}")
    for num_reqs in (1, 64, 256, 1024):
        for name, group, prefix, reports_tokens in cases:
            scheduler = start(num_reqs, (num_runs + 1) * BLOCK_SIZE, group, prefix, reports_tokens)
            schedule_us, update_us = measure(scheduler, num_runs)
            total = schedule_us + update_us
            print(f"{num_reqs:>8} {name:<26} {schedule_us:>9.1f} {update_us:>9.1f} {total:>9.1f}")


if __name__ == "__main__":
    main()
