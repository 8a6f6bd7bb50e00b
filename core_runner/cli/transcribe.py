"""`core-runner transcribe`: text of audio files, on stdout or in a file for each."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from core_runner.cli import remember_debug
from core_runner.cli.options import engine_options, model_options, refuse_graphs_at_start
from core_runner.cli.sections import SectionedCommand
from core_runner.cli.transcribe_options import chosen_options, result_options, transcription_options

if TYPE_CHECKING:
    from core_runner.cli.progress import Report
    from core_runner.cli.recordings import Recording
    from core_runner.llm import LLM
    from model_states.speech import Transcript

_EPILOG = """\b
Examples:
  core-runner transcribe talk.mp3
  core-runner transcribe film.mkv --format srt --output film.srt --language de
  core-runner transcribe interviews/ --output transcripts/ --format json --vad
  curl -s https://example.org/a.ogg | core-runner transcribe - --word-timestamps --format json

\b
A directory stands for the audio and video files in it, at any depth. Several
files are one batch. A file that cannot be read is reported, the others are
transcribed, and the exit code is 1.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG, context_settings={"max_content_width": 100})
@click.argument(
    "files", nargs=-1, required=True, metavar="[FILE|DIR|-]...", type=click.Path(exists=True, allow_dash=True)
)
@transcription_options
@result_options
@model_options
@engine_options
@click.option("--debug", is_flag=True, expose_value=False, callback=remember_debug, help="Show tracebacks.")
@click.pass_context
def transcribe(ctx: click.Context, /, **options: Any) -> None:
    """Write down what is said in each FILE: audio or video of any kind, - for stdin, or a directory.

    The transcript goes to stdout or into files, everything else to stderr.
    """
    # What can be refused is refused before torch is imported.
    _check_usage(options)
    recordings, format_name, as_list = _plan(options)
    if recordings and _transcribe(recordings, format_name, as_list, options):
        ctx.exit(1)


def _check_usage(options: dict[str, Any]) -> None:
    from core_runner.transcription import as_options

    output = options["output_path"]
    if output == "":
        raise click.UsageError("--output is empty. Give the name of a file or directory, or - for stdout.")
    if options["vad"] and options["windows"] == "sequential":
        raise click.UsageError("--vad cuts windows that are parallel; leave --windows sequential out.")
    if options["resume"] and options["overwrite"]:
        raise click.UsageError("Give --resume or --overwrite, not both.")
    if output in (None, "-") and (options["resume"] or options["overwrite"]):
        raise click.UsageError("--resume and --overwrite are for --output.")
    refuse_graphs_at_start(options)
    as_options(None, chosen_options(options))


def _plan(options: dict[str, Any]) -> tuple[list[Recording], str, bool]:
    """What to transcribe, in which format, and whether it is a list, which one file alone is not."""
    from core_runner.cli.recordings import find_recordings, skip_written, with_targets
    from core_runner.transcripts import SUFFIXES

    files, output = options["files"], options["output_path"]
    recordings = find_recordings(files)
    as_list = [recording.name for recording in recordings] != [files[0]]
    by_suffix = {suffix: name for name, suffix in SUFFIXES.items()}
    format_name = options["format_name"] or by_suffix.get(Path(output or "-").suffix.lower(), "text")
    if options["word_timestamps"] and format_name != "json":
        raise click.UsageError(
            f"--word-timestamps are written as JSON, not as {format_name}; give --format json."
        )
    if as_list and output in (None, "-") and format_name not in ("text", "json"):
        raise click.UsageError(f"--format {format_name} of several files needs --output DIR.")
    recordings = with_targets(recordings, output, SUFFIXES[format_name], as_directory=as_list)
    todo = skip_written(recordings, resume=options["resume"], overwrite=options["overwrite"])
    if len(todo) < len(recordings):
        click.echo(f"{len(recordings) - len(todo)} of {len(recordings)} are written already", err=True)
    return todo, format_name, as_list


def _transcribe(
    recordings: Sequence[Recording], format_name: str, as_list: bool, options: dict[str, Any]
) -> bool:
    """Transcribe all of them as one batch, and write each when it is done; returns whether any failed."""
    from core_runner.cli.model import opened_model
    from core_runner.cli.progress import progress_bars
    from core_runner.cli.transcript_output import TranscriptOutput

    output = TranscriptOutput(recordings, format_name, as_list=as_list)
    num_failed, audio_s = 0, 0.0
    with opened_model(_with_model(options)) as (llm, load_s), output:
        started = time.perf_counter()
        with (
            progress_bars(show=not output.to_terminal) as report,
            closing(_results(llm, recordings, options, report)) as results,
        ):
            for index, transcript in results:
                output.put(index, transcript)
                num_failed += transcript.error is not None
                audio_s += transcript.duration
        if options["stats"]:
            _print_stats(load_s, time.perf_counter() - started, audio_s, len(recordings))
    return num_failed > 0


def _results(
    llm: LLM, recordings: Sequence[Recording], options: dict[str, Any], report: Report
) -> Generator[tuple[int, Transcript], None, None]:
    return llm.transcribe_each(
        [recording.source for recording in recordings],
        progress=lambda done_s, total_s: report("Seconds of audio", int(done_s), int(total_s)),
        on_bad_audio="return",
        **chosen_options(options),
    )


def _with_model(options: dict[str, Any]) -> dict[str, Any]:
    """The same options with a model, and a warning where it is the embedded one."""
    if options["model"] is not None:
        return options
    from model_states import PluginManager
    from model_states.tasks import TRANSCRIPTION

    name, caution = PluginManager().embedded_for_task(TRANSCRIPTION)
    click.echo(f"warning: the embedded model {caution}", err=True)
    return {**options, "model": name}


def _print_stats(load_s: float, elapsed_s: float, audio_s: float, num_recordings: int) -> None:
    lines = {
        "load": f"{load_s:.2f} s",
        "audio": f"{audio_s:.1f} s in {num_recordings} {'file' if num_recordings == 1 else 'files'}",
        "time": f"{elapsed_s:.2f} s, {audio_s / elapsed_s:.1f} times as fast as it is spoken",
    }
    click.echo("\n".join(f"{name + ':':<7}{text}" for name, text in lines.items()), err=True)
