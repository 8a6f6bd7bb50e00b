"""Options in sections: what the help texts of the larger commands are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])


class SectionOption(click.Option):
    """An option that names the section of the help text in which it stands."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help shows its options by section, in the order of declaration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one definition list for each section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", "Other"), []).append(record)
        for title in sorted(sections, key="Other".__eq__):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def section(
    title: str, *declarations: tuple[tuple[str, ...], dict[str, Any]]
) -> Callable[[_Function], _Function]:
    """Decorator that gives a command the options of one section, as `option` declares them."""

    def decorate(function: _Function) -> _Function:
        # Decorators apply from the last to the first; help shows what was applied last first.
        for names, settings in reversed(declarations):
            function = click.option(*names, cls=SectionOption, section=title, **settings)(function)
        return function

    return decorate


def option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """One option: what `click.option` takes."""
    return names, settings


def given(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Those of `names` that the command has and the caller set; an unset one leaves the default to the library."""
    return {name: options[name] for name in names if options.get(name) not in (None, ())}
