"""The JSONL batch of `generate`: every row runs once, and is written when it finishes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from core_runner.cli.interrupts import DeferredInterrupt
from core_runner.cli.progress import progress_bars
from core_runner.cli.prompts import conversation, read_prompts, to_prompt
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
        _refuse_same_file(path, options["output_path"])
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
    if not file.seekable():
        return 0
    count = sum(1 for line in file if line.strip())
    file.seek(0)
    return count


def _refuse_same_file(input_path: str, output_path: str | None) -> None:
    if output_path not in (None, "-") and Path(input_path).resolve() == Path(str(output_path)).resolve():
        raise RequestError(f"--input and --output are the same file, {input_path}; name another output")


def run_batch(llm: LLM, rows: Iterable[Row], num_rows: int, results: ResultsFile, clock: Clock) -> int:
    """Run the rows that `results` has not, and write each as it finishes; returns how many failed.

    Ctrl-C takes effect between two steps, after what the step finished is written; a second one at once.
    """
    num_done = num_failed = 0
    todo = (row for row in rows if row.id not in results.done)
    watched = not (results.to_stdout and sys.stdout.isatty())
    with DeferredInterrupt() as interrupt, progress_bars(show=watched) as report:
        total = max(num_rows - len(results.done), 0)
        with closing(run_rows(llm, todo)) as steps:
            for finished in steps:
                for result in finished:
                    results.write(result)
                    num_failed += result["finish_reason"] == "error"
                num_done += len(finished)
                report("Rows", num_done, total)
                clock.tick()
                interrupt.raise_if_pending()
    return num_failed


def run_rows(llm: LLM, rows: Iterable[Row]) -> Generator[list[dict[str, Any]]]:
    """Yield the output rows that have just finished, often none, in the order in which they finish.

    Rows are read in windows, so that a large file is neither held in memory nor queued at once. A row that is
    refused becomes an error row and disturbs no other. Closing the iterator aborts what runs.
    """
    source, size = iter(rows), max(16 * llm.config.max_num_reqs, 256)
    while window := list(islice(source, size)):
        yield [error_row(row.id, row.error) for row in window if row.error is not None]
        yield from _run_window(llm, [row for row in window if row.error is None])


def _run_window(llm: LLM, rows: list[Row]) -> Generator[list[dict[str, Any]]]:
    prompts, ready, refused = [], [], []
    for row in rows:
        try:
            prompts.append(to_prompt(llm, row.kind, row.prompt))
            ready.append(row)
        except (CoreRunnerError, ModelStateError) as error:
            refused.append(error_row(row.id, f"line {row.line}: {error}"))
    yield refused
    yield from _stream(llm, ready, prompts)


def _stream(llm: LLM, rows: list[Row], prompts: list[Any]) -> Generator[list[dict[str, Any]]]:
    """Run prompts that may hold refused ones: then none has started, and each half is tried by itself."""
    if not rows:
        return
    with closing(llm.stream(prompts, [row.params for row in rows])) as deltas:
        try:
            first = next(deltas)
        except CoreRunnerError as error:
            if len(rows) == 1:
                yield [error_row(rows[0].id, f"line {rows[0].line}: {error}")]
                return
        else:
            for delta in chain([first], deltas):
                yield [] if delta.output is None else [output_row(rows[delta.request_index].id, delta.output)]
            return
    half = len(rows) // 2
    yield from _stream(llm, rows[:half], prompts[:half])
    yield from _stream(llm, rows[half:], prompts[half:])
