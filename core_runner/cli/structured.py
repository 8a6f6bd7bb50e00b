"""The form of the output, as `generate` takes it from the command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from core_runner.errors import RequestError
from core_runner.structured.options import StructuredOutput


def structured_output(options: dict[str, Any]) -> dict[str, StructuredOutput]:
    """The sampling option that --json-schema, --regex, --choice or --grammar make; empty without any.

    Raises `RequestError` for more than one of them, an unreadable file or a schema that is not JSON.
    """
    schema, grammar = options["json_schema"], options["grammar"]
    given = {
        "json": None if schema is None else _schema_text(schema),
        "regex": options["regex"],
        "choice": options["choice"] or None,
        "grammar": None if grammar is None else _read(grammar, "--grammar"),
    }
    if all(value is None for value in given.values()):
        return {}
    return {"structured_output": StructuredOutput(**given)}


def _schema_text(schema: str) -> str:
    # A schema is an object, so its text begins with a brace, which a path hardly ever does. Other JSON is told
    # what a schema is, unless there is a file of that name.
    is_text = schema.lstrip().startswith("{") or (not os.path.exists(schema) and _is_json(schema))
    return schema if is_text else _read(schema, "--json-schema")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read(path: str, option: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {path!r} cannot be read: {error}") from error
