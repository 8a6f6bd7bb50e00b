"""Options of `transcribe`, grouped for its help text."""

from __future__ import annotations

from typing import Any

import click

from core_runner.cli.sections import option, section

_FORMATS = ("text", "json", "srt", "vtt", "tsv")

transcription_options = section(
    "Transcription",
    option(
        "--language", metavar="CODE|NAME", help="Language that is spoken. [default: what the model hears]"
    ),
    option(
        "--task",
        type=click.Choice(["transcribe", "translate"]),
        help="Write what is said, or translate it into English. [default: transcribe]",
    ),
    option("--word-timestamps", is_flag=True, default=None, help="Times of each word, in JSON."),
    option(
        "--windows",
        type=click.Choice(["sequential", "parallel"]),
        help="One after another, each with the text before it; or cut at quiet points and all at once, which is many "
        "times faster. [default: sequential]",
    ),
    option("--vad", is_flag=True, help="The same as --windows parallel."),
    option("--initial-prompt", metavar="TEXT", help="Text as if said before, such as names to expect."),
    option(
        "--no-previous-text",
        "condition_on_previous_text",
        flag_value=False,
        default=None,
        help="Do not show a window the text before it.",
    ),
    option(
        "--temperature",
        "temperatures",
        multiple=True,
        type=float,
        metavar="X",
        help="Tried in turn while a window looks wrong (repeatable). [default: 0, 0.2, ... 1]",
    ),
    option(
        "--compression-ratio-threshold",
        type=float,
        metavar="X",
        help="Above it, text repeats itself and looks wrong; inf is off. [default: 2.4]",
    ),
    option(
        "--logprob-threshold",
        type=float,
        metavar="X",
        help="Below this mean log-probability, text looks wrong; -inf is off. [default: -1]",
    ),
    option(
        "--no-speech-threshold",
        type=float,
        metavar="X",
        help="Above this probability of no speech, such text is silence; inf is off. [default: 0.6]",
    ),
    option("--seed", type=int, metavar="N", help="Seed of temperatures above 0. [default: 0]"),
)
result_options = section(
    "Output",
    option(
        "--format", "format_name", type=click.Choice(_FORMATS), help="[default: that of --output, else text]"
    ),
    option(
        "--output",
        "output_path",
        type=click.Path(),
        metavar="DIR|FILE",
        help="A file for each input in DIR, or FILE for a single one; - is stdout.",
    ),
    option("--resume", is_flag=True, help="Leave out inputs whose file in --output exists."),
    option("--overwrite", is_flag=True, help="Replace the files in --output."),
    option("--stats", is_flag=True, help="Report speed on stderr."),
)

# Those that `model_states.speech.TranscriptionOptions` has under the same name.
_FIELDS = (
    "language",
    "task",
    "word_timestamps",
    "windows",
    "initial_prompt",
    "condition_on_previous_text",
    "temperatures",
    "compression_ratio_threshold",
    "logprob_threshold",
    "no_speech_threshold",
    "seed",
)


def chosen_options(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of `TranscriptionOptions` that the caller set."""
    fields = {name: options[name] for name in _FIELDS if options[name] not in (None, ())}
    return fields | {"windows": "parallel"} if options["vad"] else fields
