"""`StructuredOutput`: the form that a request's output must have. Needs no grammar library."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from core_runner.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Exactly one of the four; whether the grammar itself is sound is checked at admission.

    json: a JSON schema as a dict or text, or a class that has `model_json_schema()` (pydantic's models have).
    regex: a regular expression that the whole output matches (no look-around, no back-references).
    choice: texts of which the output is one. grammar: a grammar in EBNF: Lark with the rule `start`, or GBNF
    with the rule `root` (told by its `::=`).
    Errors: `RequestError`. Afterwards `json` is the schema's text and `choice` a tuple.
    """

    json: Any = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Refuse anything but one value of the right type."""
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"structured_output needs exactly one of {', '.join(KINDS)}; it has {found}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        else:
            _require_text(given[0], getattr(self, given[0]))

    @property
    def kind(self) -> str:
        """Which of the four it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @classmethod
    def of(cls, value: Any) -> StructuredOutput:
        """`value` itself, or made of a mapping such as {"regex": "[0-9]+"}, as a JSONL row has it."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not set(value) <= set(KINDS):
            raise RequestError(
                f"structured_output={value!r} must be a StructuredOutput, or a mapping with one of "
                f"{', '.join(KINDS)}"
            )
        return cls(**value)


def _schema_text(schema: Any) -> str:
    """The schema as JSON text, in the order in which its keys were given: properties come out in that order."""
    make = getattr(schema, "model_json_schema", None)
    if callable(make):
        schema = make()
    try:
        value = json_module.loads(schema) if isinstance(schema, str) else schema
        text = json_module.dumps(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"structured_output.json={_short(schema)} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise RequestError(
            f"structured_output.json={_short(schema)} must be a JSON schema, which is an object"
        )
    return text


def _choices(choice: Any) -> tuple[str, ...]:
    values = None if isinstance(choice, str) or not isinstance(choice, Iterable) else tuple(choice)
    if not values or not all(isinstance(value, str) and value for value in values):
        raise RequestError(f"structured_output.choice={choice!r} must be a list of non-empty texts")
    for value in values:
        _require_text("choice", value)
    return values


def _require_text(kind: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"structured_output.{kind}={value!r} must be a non-empty text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"structured_output.{kind}={_short(value)} cannot be UTF-8: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
