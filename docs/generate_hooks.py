"""Write docs/hooks.md from the hook specs: `python docs/generate_hooks.py`, or `--check` to compare only."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from model_states import hookspecs
from model_states.hook_names import HOT_HOOKS, combine_rule, hook_functions
from model_states.hookspecs import API_VERSION, ColdHooks, HotHooks
from model_states.interface import CAPABILITIES

PAGE = Path(__file__).with_name("hooks.md")
_COMBINED = {
    "notify": "Every implementation is called; there is no result.",
    "concatenate": "The lists of all implementations are concatenated in call order.",
    "merge": "The mappings of all implementations are merged; a name given twice is an error.",
    "chain": "Implementations are chained: each is given what the one before it returned.",
}


def page() -> str:
    """The whole page."""
    cold = [line for name, f in hook_functions(ColdHooks).items() for line in _hook(name, f)]
    hot = [line for name, f in hook_functions(HotHooks).items() for line in _hook(name, f)]
    capabilities = [f"- `{name}`: {meaning}." for name, meaning in CAPABILITIES.items()]
    lines = [
        "# Hooks",
        "",
        "<!-- Written by docs/generate_hooks.py from model_states/hookspecs.py; edit the specs instead. -->",
        "",
        *_prose(inspect.getdoc(hookspecs) or "", skip=1),
        f"The contract has API version {API_VERSION}; a model state declares it as `api_version`.",
        "",
        "## Hooks of a plugin's module",
        "",
        *cold,
        "## Hooks of a loaded model",
        "",
        f"In the order of the specs: {', '.join(f'[`{name}`](#{name})' for name in HOT_HOOKS)}.",
        "",
        *hot,
        "## Capabilities",
        "",
        "Names for `capabilities`; what is missing is switched off, or refused if it was asked for.",
        "",
        *capabilities,
    ]
    return "\n".join(lines) + "\n"


def _hook(name: str, function: Callable[..., Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield f"```python\n{_signature(name, function)}\n```"
    yield ""
    yield from _prose(inspect.getdoc(function) or "")
    if name in HOT_HOOKS:
        yield _COMBINED[combine_rule(name)]
        yield ""


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    arguments = [f"{p.name}: {p.annotation}" for p in list(signature.parameters.values())[1:]]
    return f"{name}({', '.join(arguments)}) -> {signature.return_annotation}"


def _prose(text: str, skip: int = 0) -> Iterator[str]:
    """Paragraphs of a docstring as markdown, one line each; fields become list items."""
    for paragraph in text.split("\n\n")[skip:]:
        for part in re.split(r"\n(?=:)", paragraph):
            line = " ".join(part.split())
            line = re.sub(r"^:param (\w+): ", r"- `\1`: ", line)
            line = re.sub(r"^:returns: ", "- returns: ", line)
            yield re.sub(r"^\.\. versionadded:: (\S+)$", r"*Added in version \1.*", line)
        yield ""


def main() -> None:
    """Write the page, or with `--check` exit with 1 if it is out of date."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit("docs/hooks.md is out of date; run python docs/generate_hooks.py")


if __name__ == "__main__":
    main()
