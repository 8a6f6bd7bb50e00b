"""`core-runner`, the command line. This module imports click alone, so that `--help` answers at once."""

from __future__ import annotations

import importlib
from typing import Any

import click

DEBUG_KEY = "core_runner.debug"

# Name -> (module, help). The help stands here so that listing the commands imports none of them.
_COMMANDS = {
    "generate": ("core_runner.cli.generate", "Generate text from prompts, files or a JSONL batch."),
    "transcribe": ("core_runner.cli.transcribe", "Write down what is said in audio and video files."),
    "plugins": ("core_runner.cli.plugins", "List the installed plugins; explain the choice for a model."),
}

_EPILOG = """\b
Examples:
  core-runner generate "Once upon a time"
  core-runner generate --model ./my-model --chat "Why is the sky blue?"
  core-runner generate --input rows.jsonl --output results.jsonl
  core-runner transcribe talk.mp3
  core-runner plugins
"""


class _LazyGroup(click.Group):
    """A group that imports a command when it is called, and reports its failures in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order in which help shows them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of `cmd_name` and return its command; None for an unknown name."""
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(_COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; user errors, Ctrl-C and a closed pipe end it without a traceback."""
        from core_runner.cli.failures import reported

        with reported(ctx):
            return super().invoke(ctx)


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib import metadata

    try:
        version = metadata.version("core-runner")
    except metadata.PackageNotFoundError:
        version = "(a checkout that is not installed)"
    click.echo(f"core-runner {version}")
    ctx.exit()


def remember_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Callback of every `--debug` option: `meta` is shared by the contexts of group and command."""
    if value:
        ctx.meta[DEBUG_KEY] = True


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version)
@click.option("--debug", is_flag=True, expose_value=False, callback=remember_debug, help="Show tracebacks.")
def main() -> None:
    """Run a language or speech model. Without --model it is a small one that comes with the package."""
