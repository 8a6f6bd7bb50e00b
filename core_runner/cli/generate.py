"""`core-runner generate`: text from prompts on stdout, or a JSONL batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from core_runner.cli import remember_debug
from core_runner.cli.options import (
    SAMPLING_OPTIONS,
    engine_options,
    input_options,
    model_options,
    order_options,
    output_options,
    refuse_graphs_at_start,
    sampling_options,
    structure_options,
)
from core_runner.cli.sections import SectionedCommand, given

if TYPE_CHECKING:
    from core_runner.cli.rows import Row
    from core_runner.llm import LLM
    from core_runner.sampling_params import SamplingParams

_EPILOG = """\b
Examples:
  core-runner generate "Once upon a time"
  core-runner generate --chat --temperature 0 "What is 12 + 30?"
  echo "Once upon a time" | core-runner generate - --stats
  core-runner generate @prompt.txt --model ./my-model --max-tokens 400
  core-runner generate --input rows.jsonl --output results.jsonl --resume
  core-runner generate --choice yes --choice no "Is the sky blue?"

\b
A row of --input is {"prompt": TEXT}, {"prompt_token_ids": [...]} or
{"messages": [...]}, with an optional "id" (else "line-3" in line 3) and
sampling options of its own, named as in SamplingParams:
{"id": "a", "prompt": "Hi", "temperature": 0}. Each finished row is one line of
--output: id, text, token_ids, finish_reason, usage, error.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG, context_settings={"max_content_width": 100})
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@input_options
@output_options
@sampling_options
@structure_options
@model_options
@engine_options
@order_options
@click.option("--debug", is_flag=True, expose_value=False, callback=remember_debug, help="Show tracebacks.")
@click.pass_context
def generate(ctx: click.Context, /, **options: Any) -> None:
    """Generate text from each PROMPT: a text, - for stdin, or @FILE.

    The text goes to stdout as it comes, everything else to stderr.
    """
    from core_runner.cli.structured import structured_output
    from core_runner.sampling_params import SamplingParams

    # What can be refused is refused before torch is imported.
    _check_usage(options)
    chosen = given(options, SAMPLING_OPTIONS) | structured_output(options)
    SamplingParams(**chosen)
    if options["input_path"] is None and options["output_path"] is None:
        failed = _generate_text(options, chosen)
    else:
        failed = _generate_rows(options, chosen)
    if failed:
        ctx.exit(1)


def _check_usage(options: dict[str, Any]) -> None:
    has_prompts = bool(options["prompts"] or options["prompt_file"])
    batch, output = options["input_path"] is not None, options["output_path"]
    _check_sources(options)
    if not (has_prompts or batch):
        raise click.UsageError("No prompt. Give a text, - for stdin, @FILE, or --input rows.jsonl.")
    if has_prompts and batch:
        raise click.UsageError("Give prompts or --input, not both.")
    if batch and (options["chat"] or options["system"]):
        raise click.UsageError(
            '--chat and --system are for prompts; a row of --input says {"messages": [...]}.'
        )
    if options["system"] and not options["chat"]:
        raise click.UsageError("--system needs --chat.")
    if options["resume"] and options["overwrite"]:
        raise click.UsageError("Give --resume or --overwrite, not both.")
    if output is None and not batch and (options["resume"] or options["overwrite"]):
        raise click.UsageError("--resume and --overwrite are for --output.")
    if options["priority"] is not None and options["policy"] != "priority":
        raise click.UsageError(
            f"--priority {options['priority']} has no effect under --policy fcfs; give --policy priority."
        )
    refuse_graphs_at_start(options)


def _check_sources(options: dict[str, Any]) -> None:
    """Refuse names that are empty, and stdin for two things: what is read second would find it empty."""
    if options["output_path"] == "":
        raise click.UsageError("--output is empty. Give the name of a file, or - for stdout.")
    if "@" in options["prompts"]:
        raise click.UsageError(
            "The prompt @ names no file. Give @FILE; a prompt that begins with @ is @@...."
        )
    readers = ["PROMPT" for prompt in options["prompts"] if prompt in ("-", "@-")]
    readers += ["--prompt-file" for name in options["prompt_file"] if name == "-"]
    readers += [
        option
        for option, name in (
            ("--input", "input_path"),
            ("--json-schema", "json_schema"),
            ("--grammar", "grammar"),
        )
        if options[name] == "-"
    ]
    if len(readers) > 1:
        raise click.UsageError(
            f"'-' is given for {' and '.join(readers)}, and stdin can be read once only. Keep one of them."
        )


def _generate_text(options: dict[str, Any], chosen: dict[str, Any]) -> bool:
    """Stream the prompts' texts to stdout; returns whether a request failed."""
    from core_runner.cli.model import opened_model
    from core_runner.cli.prompts import conversation, read_prompts
    from core_runner.cli.stats import Clock
    from core_runner.cli.text import print_logprobs, write_texts

    texts = read_prompts(options["prompts"], options["prompt_file"])
    failed = False
    with opened_model(options) as (llm, load_s):
        prompts: list[Any] = list(texts)
        if options["chat"]:
            prompts = llm.render_chat([conversation(text, options["system"]) for text in texts])
        clock = Clock(llm, load_s)
        sampling = _sampling(llm, chosen)
        with closing(llm.stream(prompts, sampling)) as deltas:
            for output in write_texts(deltas, len(prompts), sampling.n):
                clock.tick()
                if output is not None and output.error is not None:
                    click.echo(f"error: {output.error}", err=True)
                    failed = True
                if output is not None:
                    print_logprobs(output, llm.tokenizer)
        if options["stats"]:
            clock.print_report(overlapping=len(prompts) > 1)
    return failed


def _generate_rows(options: dict[str, Any], chosen: dict[str, Any]) -> bool:
    """Run the rows, each written when it is finished. A bad row says so itself: the batch has not failed."""
    from core_runner.cli.batch import opened_rows, refuse_same_file, run_batch
    from core_runner.cli.model import opened_model
    from core_runner.cli.results import ResultsFile
    from core_runner.cli.stats import Clock

    refuse_same_file(options["input_path"], options["output_path"])
    results = ResultsFile(options["output_path"], resume=options["resume"], overwrite=options["overwrite"])
    with opened_rows(options) as source, opened_model(options) as (llm, load_s), results:
        clock = Clock(llm, load_s)
        rows, seen = source.read(_sampling(llm, chosen)), Counter[str]()
        num_failed = run_batch(llm, _watch_priority(rows, seen), source.num_rows, results, clock)
        if options["stats"]:
            clock.print_report(overlapping=True)
    if seen["priority"] and options["policy"] != "priority":
        click.echo(
            f'{_rows(seen["priority"])} with a "priority", which has no effect under --policy fcfs; give '
            "--policy priority",
            err=True,
        )
    if num_failed:
        click.echo(f'{_rows(num_failed)} failed; "error" in the output says why', err=True)
    return False


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _watch_priority(rows: Iterable[Row], seen: Counter[str]) -> Iterator[Row]:
    """The rows as they come; those that want another place in the queue are counted."""
    for row in rows:
        seen["priority"] += row.params.priority != 0
        yield row


def _sampling(llm: LLM, chosen: dict[str, Any]) -> SamplingParams:
    defaults: SamplingParams = llm.default_sampling_params
    return replace(defaults, **chosen)
