"""Forms that outputs must have, each with a check of its own that knows nothing of the grammar library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from core_runner import StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CHOICES = ["yes", "yes, but later", "no", 'say "no"', "tab\tor\nline"]
LIST = 'start: item ("," item)~0..2\nitem: DIGIT | "(" item ")"\nDIGIT: /[0-4]/\n'
GBNF = 'root ::= pair pair?\npair ::= [x-z] "=" [0-9] ";"\n'


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "likes"]
        and isinstance(person["name"], str)
        and 1 <= len(person["name"]) <= 9
        and type(person["age"]) is int
        and 0 <= person["age"] <= 120
        and 1 <= len(person["likes"]) <= 2
        and set(person["likes"]) <= {"red", "blue"}
    )


def is_list(text: str) -> bool:
    items = text.split(",")
    nested = [re.fullmatch(r"(\(*)[0-4](\)*)", item) for item in items]
    return len(items) <= 3 and all(m is not None and len(m[1]) == len(m[2]) for m in nested)


FORMS: dict[str, tuple[StructuredOutput, Callable[[str], object]]] = {
    "schema": (StructuredOutput(json=PERSON), is_person),
    "regex": (
        StructuredOutput(regex=r"[A-Z][a-z]{2,8}-[0-9]{2}(\.[0-9])?"),
        lambda t: re.fullmatch(r"[A-Z][a-z]{2,8}-[0-9]{2}(\.[0-9])?", t),
    ),
    "choice": (StructuredOutput(choice=CHOICES), CHOICES.__contains__),
    "lark": (StructuredOutput(grammar=LIST), is_list),
    "gbnf": (StructuredOutput(grammar=GBNF), lambda t: re.fullmatch(r"([x-z]=[0-9];){1,2}", t)),
}
