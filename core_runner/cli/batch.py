"""The JSONL batch of `generate`: every row runs once, and is written when it finishes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from core_runner.cli.interrupts import DeferredInterrupt
from core_runner.cli.progress import progress_bars
from core_runner.cli.prompts import conversation, read_prompts
from core_runner.cli.results import ResultsFile
from core_runner.cli.rows import Row, error_row, output_row, parse_rows
from core_runner.cli.stats import Clock
from core_runner.errors import CoreRunnerError, RequestError
from model_states.errors import ModelStateError

if TYPE_CHECKING:
    from core_runner.llm import LLM
    from core_runner.sampling_params import SamplingParams


@contextmanager
def opened_rows(options: dict[str, Any]) -> Iterator[RowSource]:
    """The rows of `--input`, or one for each prompt of the command line."""
    path = options["input_path"]
    if path is None:
        texts = read_prompts(options["prompts"], options["prompt_file"])
        yield RowSource(len(texts), lambda base: _prompt_rows(texts, base, options))
    elif path == "-":
        yield RowSource(0, lambda base: parse_rows(sys.stdin.buffer, base))
    else:
        with Path(path).open("rb") as file:
            yield RowSource(_count_rows(file), lambda base: parse_rows(file, base))


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows to run. read: gives them one by one, with the sampling options that they do not set themselves.

    num_rows is 0 where it is not known, as for a pipe.
    """

    num_rows: int
    read: Callable[[SamplingParams], Iterator[Row]]


def _prompt_rows(texts: list[str], base: SamplingParams, options: dict[str, Any]) -> Iterator[Row]:
    for number, text in enumerate(texts, 1):
        if options["chat"]:
            yield Row(number, number, "messages", conversation(text, options["system"]), base)
        else:
            yield Row(number, number, "prompt", text, base)


def _count_rows(file: BinaryIO) -> int:
    # A pipe, as in --input <(program), can be read once only.
    if not file.seekable():
        return 0
    count = sum(1 for line in file if line.strip())
    file.seek(0)
    return count


def refuse_same_file(input_path: str | None, output_path: str | None) -> None:
    """Raise `RequestError` when the results would be written over the rows."""
    if input_path in (None, "-") or output_path in (None, "-"):
        return
    # The same file may have two names, as by a hard link; an output that is not there yet is no other's.
    if os.path.exists(output_path) and os.path.samefile(input_path, output_path):
        raise RequestError(
            f"--input {input_path} and --output {output_path} are the same file; name another output"
        )


def run_batch(llm: LLM, rows: Iterable[Row], num_rows: int, results: ResultsFile, clock: Clock) -> int:
    """Run the rows that `results` has not, and write each as it finishes; returns how many failed.

    Ctrl-C takes effect between two steps, after what the step finished is written; a second one at once.
    """
    num_done = num_failed = 0
    total = max(num_rows - len(results.done), 0)
    todo = (row for row in rows if row.id not in results.done)
    # Rows on the same terminal would be torn by a bar that redraws itself.
    watched = not (results.to_stdout and sys.stdout.isatty())
    with (
        DeferredInterrupt(lambda: llm.stats().steps) as interrupt,
        progress_bars(show=watched) as report,
        closing(run_rows(llm, todo)) as finished,
    ):
        for result in finished:
            # A refused row is no token, and would count as a very early one.
            if result is None or result["token_ids"]:
                clock.tick()
            if result is not None:
                results.write(result)
                num_failed += result["finish_reason"] == "error"
                num_done += 1
                report("Rows", num_done, total)
            interrupt.raise_if_due()
    return num_failed


def run_rows(llm: LLM, rows: Iterable[Row]) -> Generator[dict[str, Any] | None]:
    """Yield the output row of each request when it finishes, and None for every other sign of life.

    Rows are read in windows, so that a large file is neither held in memory nor queued at once; a window is
    many times what runs together, since its last requests run in emptying batches. A row that is refused
    becomes an error row and disturbs no other. Closing the iterator aborts what runs.
    """
    source, size = iter(rows), max(16 * llm.config.max_num_reqs, 256)
    while window := list(islice(source, size)):
        ready: list[tuple[Row, Any]] = []
        refused: list[dict[str, Any]] = []
        for row in window:
            prompt, error = _prompt_of(llm, row)
            if error is None:
                ready.append((row, prompt))
            else:
                refused.append(error_row(row.id, error))
        yield from _run_window(llm, ready)
        # Last, since a row with a used id shares it with one that may still run: --resume must not skip that.
        yield from refused


def _prompt_of(llm: LLM, row: Row) -> tuple[Any, str | None]:
    """What `LLM.stream` takes for a row, or why there is nothing to take."""
    if row.error is not None or row.kind != "messages":
        return row.prompt, row.error
    try:
        return llm.render_chat([row.prompt])[0], None
    except (CoreRunnerError, ModelStateError) as error:
        return None, f"line {row.line}: {error}"


def _run_window(llm: LLM, ready: list[tuple[Row, Any]]) -> Generator[dict[str, Any] | None]:
    prompts, params = [prompt for _, prompt in ready], [row.params for row, _ in ready]
    with closing(llm.stream(prompts, params, on_bad_prompt="return")) as deltas:
        for delta in deltas:
            if delta.output is None:
                yield None
                continue
            row = ready[delta.request_index][0]
            yield output_row(row, delta.output)
