"""`core-runner plugins`: which plugins are installed, what they serve, and why one of them is not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from model_states import PluginManager, PluginRow

# Long lists of architectures stay readable when the output is a file and has no width of its own.
_WIDTH_WITHOUT_TERMINAL = 140


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON list, for programs.")
@click.option("--strict", is_flag=True, help="Exit with 1 if a plugin is broken.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, strict: bool) -> None:
    """List installed plugins: versions, architectures, hooks, and the reason of each broken one."""
    if ctx.invoked_subcommand is not None:
        return
    rows = _quiet_manager().plugins()
    if as_json:
        _print_json(rows)
    else:
        _print_table(rows)
    if strict and any(row.status == "broken" for row in rows):
        ctx.exit(1)


@plugins.command()
@click.argument("model")
@click.option("--model-state", help="Choose this model state instead of the one that claims the model.")
@click.option("--trust-remote-code", is_flag=True, help="Allow code of the model's own repository.")
def explain(model: str, model_state: str | None, trust_remote_code: bool) -> None:
    """Say which model state serves MODEL, why, and what it cannot do."""
    from model_states.loading import load_checkpoint_config

    manager = _quiet_manager()
    checkpoint = load_checkpoint_config(manager.locate(model), trust_remote_code=trust_remote_code)
    click.echo(manager.explain(checkpoint, model_state))


def _quiet_manager() -> PluginManager:
    """A manager whose warnings are left out: these commands print the same reasons themselves."""
    import logging

    from model_states import PluginManager

    log = logging.getLogger("model_states.manager")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return PluginManager()
    finally:
        log.setLevel(level)


def _print_json(rows: Sequence[PluginRow]) -> None:
    import dataclasses
    import json

    click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


def _print_table(rows: Sequence[PluginRow]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    table = Table("name", "distribution", "version", "status", "architectures", "hooks")
    for row in rows:
        lists = (", ".join(row.architectures) or "-", ", ".join(row.hooks) or "-")
        # Text, since a plugin's name may hold what rich would read as markup.
        table.add_row(*map(Text, (row.name, row.distribution, row.version, row.status, *lists)))
    console.print(table if rows else "no plugin is installed")
    for row in rows:
        if row.error is not None:
            console.print(Text(row.error), soft_wrap=True)
        if row.status == "disabled":
            console.print(Text(f"plugin {row.name!r} is disabled by MODEL_STATES_DISABLE"))
