"""Where a steady decode step goes: host time, calls of the CUDA API, device time by class of kernel, memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import greedy, synchronize
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from workloads import Job

from core_runner import LLM
from core_runner.request import Request

CLASSES = (
    "attention",
    "matmul",
    "norm, rope, elementwise",
    "state",
    "sampler",
    "input preparation",
    "copies",
)
# Our own kernels by the file they are defined in, others by their names; the first pattern found decides.
OF_FILE = {
    r"^model_states_|state_rows|copy_rows": "state",
    r"/sampling/": "sampler",
    r"core_runner/kernels|staged_write|write_runs": "input preparation",
    r"rope|norm": "norm, rope, elementwise",
    r"attention|write_cache": "attention",
    r"linear|matmul|matrix|vector|gemm|gemv|product": "matmul",
}
OF_NAME = {
    r"memcpy|memset": "copies",
    r"flash|fmha|attention": "attention",
    r"gemm|nvjet|cutlass|cublas|gemv|splitk|xmma": "matmul",
}
_NUMBERS = itertools.count()
_OTHERWISE = "norm, rope, elementwise"
_JITTED = re.compile(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)")


@cache
def kernel_files() -> dict[str, str]:
    """Name of each Triton function of ours, and of the installed plugins -> its file."""
    plugins = {point.module.split(".")[0] for point in importlib.metadata.entry_points(group="model_states")}
    files = {}
    for package in ("core_runner", "model_states", *sorted(plugins)):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            for path in Path(root).rglob("*.py"):
                for name in _JITTED.findall(path.read_text(encoding="utf-8")):
                    files[name] = f"{package}/{path.relative_to(root).as_posix()}"
    return files


@cache
def class_of(kernel: str) -> str:
    """The class of a device operation by its name in the profile."""
    file = kernel_files().get(kernel)
    rules, text = (OF_NAME, kernel) if file is None else (OF_FILE, file)
    found = (name for pattern, name in rules.items() if re.search(pattern, text, re.IGNORECASE))
    return next(found, _OTHERWISE)


class WaitMeter:
    """Seconds for which this thread waits for device events."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count every wait of the calling thread within the block."""
        owner, original = threading.get_ident(), torch.cuda.Event.synchronize

        def synchronize(event: torch.cuda.Event) -> None:
            started = time.perf_counter()
            original(event)
            if threading.get_ident() == owner:
                self.seconds += time.perf_counter() - started

        torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.cuda.Event.synchronize = original  # type: ignore[method-assign]


def loop_time() -> float:
    """Milliseconds of 100,000 turns of a loop that does nothing: how fast the core runs Python at this moment."""
    started = time.perf_counter()
    for _ in range(100_000):
        pass
    return 1000 * (time.perf_counter() - started)


def host_time(step: Callable[[], object], steps: int, wait: bool = False) -> dict[str, float]:
    """Milliseconds of a step: outside of the calling thread's waits for the device, and in all. No profiler runs.

    By the clock on the wall: a thread's CPU time comes in ticks of 10 ms on some virtual machines. Nothing is waited
    for, so the device stays one step behind from the first to the last, as in use; wait: begin with an idle device
    and wait for its end. loop_ms: `loop_time` around it.
    """
    loop = loop_time()
    if wait:
        synchronize()
    meter = WaitMeter()
    with meter.measuring():
        started = time.perf_counter()
        for _ in range(steps):
            step()
        host = time.perf_counter() - started - meter.seconds
    if wait:
        synchronize()
    wall = time.perf_counter() - started
    loop_ms = (loop + loop_time()) / 2
    return {"host_ms": 1000 * host / steps, "wall_ms": 1000 * wall / steps, "loop_ms": loop_ms}


def quietest(windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The window in which the host was fastest, with the slowest one's host and loop time beside it, and then all."""
    best, worst = (choose(windows, key=lambda window: window["host_ms"]) for choose in (min, max))
    slowest = {"slowest_host_ms": worst["host_ms"], "slowest_loop_ms": worst["loop_ms"]}
    return best | slowest | {"windows": list(windows)}


def device_profile(step: Callable[[], object], steps: int, top: int = 14) -> dict[str, Any]:
    """By torch.profiler, for one step: device milliseconds of each class, calls of the CUDA API, longest kernels."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as result:
        for _ in range(steps):
            step()
        synchronize()
    classes, calls, kernels = dict.fromkeys(CLASSES, 0.0), Counter(), []
    for event in result.key_averages():
        if event.device_type != DeviceType.CPU:
            milliseconds = event.self_device_time_total / steps / 1000
            classes[class_of(event.key)] += milliseconds
            kernels.append((event.key[:80], class_of(event.key), milliseconds, event.count / steps))
        elif re.match(r"cu(da)?[A-Z]", event.key) and event.key != "cudaDeviceSynchronize":
            calls[event.key] += event.count / steps
    kernels.sort(key=lambda kernel: -kernel[2])
    return {
        "device_ms": sum(classes.values()),
        "device_ops": sum(count for *_, count in kernels),
        "classes_ms": classes,
        "cuda_calls": sum(calls.values()),
        "calls": dict(calls.most_common()),
        "top": kernels[:top],
    }


def start(llm: LLM, jobs: Sequence[Job]) -> None:
    """Queue the jobs, under names that are used once."""
    first = next(_NUMBERS)
    for index, job in enumerate(jobs):
        llm.engine.add_request(Request(f"{first}-{index}", job.prompt, greedy(job.num_output), seed=index))


def memory(llm: LLM) -> dict[str, float]:
    """GiB of weights, caches and recorded graphs, the most that torch ever held, and what lies outside torch."""
    runner = llm.engine.runner
    caches = [t for group in runner.caches.values() for layer in group.values() for t in layer.values()]
    found = {"weights": _bytes(_parameters(runner.model_state)), "caches": _bytes(caches)}
    if torch.cuda.is_available():
        # Graphs record into memory pools of their own; (0, 0) is everybody's.
        segments = torch.cuda.memory_snapshot()
        found["graphs"] = sum(
            s["total_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)
        )
        found["most_in_torch"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        found["outside_torch"] = total - free - torch.cuda.memory_reserved()
    return {name: size / 2**30 for name, size in found.items()}


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _parameters(model_state: Any) -> list[torch.Tensor]:
    modules = [value for value in vars(model_state).values() if isinstance(value, torch.nn.Module)]
    inner = [getattr(value, "model", None) for value in vars(model_state).values()]
    modules += [value for value in inner if isinstance(value, torch.nn.Module)]
    return [parameter.data for module in modules for parameter in module.parameters()]
