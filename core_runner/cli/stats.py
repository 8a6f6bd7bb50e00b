"""What `--stats` says: how fast it went, what the cache did, and which steps were graphs."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from core_runner.llm import LLM

# Counting free blocks for every token of a large batch would show in the speed that is measured.
_READING_EVERY_S = 0.02


class Clock:
    """Times of one run of the command, in seconds, and the most cache blocks that were in use at once."""

    def __init__(self, llm: LLM, load_s: float) -> None:
        self._llm = llm
        self._load_s = load_s
        self._started = time.perf_counter()
        self._first_token_s: float | None = None
        self._peak_blocks = 0
        self._next_reading_s = 0.0

    def tick(self) -> None:
        """Take a reading; called for everything that the engine hands out."""
        elapsed_s = time.perf_counter() - self._started
        if self._first_token_s is None:
            self._first_token_s = elapsed_s
        if elapsed_s >= self._next_reading_s:
            stats = self._llm.stats()
            self._peak_blocks = max(self._peak_blocks, stats.num_blocks - stats.free_blocks)
            self._next_reading_s = elapsed_s + _READING_EVERY_S

    def print_report(self, *, overlapping: bool) -> None:
        """Write the report to stderr. overlapping: prompts and outputs of several requests share the time."""
        elapsed_s = time.perf_counter() - self._started
        first_s = elapsed_s if self._first_token_s is None else self._first_token_s
        prompt_s, output_s = (elapsed_s, elapsed_s) if overlapping else (first_s, elapsed_s - first_s)
        stats = self._llm.stats()
        # A single request's first token came with its prompt.
        num_outputs = stats.generated_tokens - (0 if overlapping else 1)
        lines = {
            "load": f"{self._load_s:.2f} s",
            "first token": f"{first_s * 1000:.0f} ms",
            "prompt": f"{stats.prompt_tokens} tokens, {_rate(stats.prompt_tokens, prompt_s)}",
            "generated": f"{stats.generated_tokens} tokens, {_rate(num_outputs, output_s)}",
            "cached": f"{stats.cached_tokens} of the prompts' tokens",
            "cache use": f"{self._peak_blocks} of {stats.num_blocks} blocks at most",
            "preemptions": str(stats.preemptions),
            "steps": f"{stats.steps} in {elapsed_s:.2f} s",
        }
        graphs = self._llm.engine.runner.graphs
        if graphs.enabled:
            lines["graphs"] = f"{_replays(stats.step_ways)} steps replayed"
        click.echo("\n".join(f"{name + ':':<13}{text}" for name, text in lines.items()), err=True)
        if graphs.enabled:
            click.echo(textwrap.indent(graphs.report(), "  "), err=True)


def _replays(step_ways: dict[str, int]) -> int:
    return sum(count for way, count in step_ways.items() if way.endswith("graph"))


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else "-"
