"""Prompts of the command line: an argument, `-` for stdin, `@file` or `--prompt-file`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from core_runner.errors import RequestError

Messages = list[dict[str, Any]]


def read_prompts(arguments: Sequence[str], files: Iterable[str]) -> list[str]:
    """Texts of all prompts in order, those of `--prompt-file` last.

    One newline at the end of a file is dropped, as `$(...)` does: editors and `echo` add it, nobody means it.
    """
    if list(arguments).count("-") + list(files).count("-") > 1:
        raise RequestError("'-' is given more than once, and stdin can be read once only; keep one of them")
    prompts = [_read_argument(argument) for argument in arguments]
    return prompts + [_read_source(name) for name in files]


def conversation(prompt: str, system: str | None) -> Messages:
    """The messages of one prompt in chat form."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


def _read_argument(argument: str) -> str:
    if argument == "-":
        return _read_source("-")
    if argument.startswith("@@"):
        return argument[1:]
    if argument.startswith("@"):
        return _read_source(argument[1:])
    return _require_text(argument.encode("utf-8", "surrogateescape"), "the prompt")


def _read_source(name: str) -> str:
    if name == "-":
        return _require_text(sys.stdin.buffer.read(), "stdin").removesuffix("\n")
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        hint = "; a prompt that begins with @ is written @@" if not Path(name).exists() else ""
        raise RequestError(f"prompt file {name!r} cannot be read ({error.strerror}){hint}") from error
    return _require_text(content, f"prompt file {name!r}").removesuffix("\n")


def _require_text(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is not UTF-8 text (byte {error.start}); convert it first") from error
