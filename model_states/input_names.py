"""Model inputs that nobody reads are refused: a misspelt name would else be served as if nothing had been given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from model_states.interface import Component


def input_names(implementations: Sequence[Component]) -> frozenset[str] | None:
    """Every name that one of them reads, or None where one judges the names itself."""
    declared = [implementation.input_names for implementation in implementations]
    if None in declared:
        return None
    return frozenset[str]().union(*(names for names in declared if names is not None))


def check_input_names(given: Iterable[str], known: frozenset[str] | None) -> None:
    """Raise `ValueError` for names that are not `known`, which is what `input_names` gives."""
    unknown = [] if known is None else sorted(str(name) for name in given if name not in known)
    if unknown:
        taken = f"give only {', '.join(sorted(known))}" if known else "it takes tokens alone"
        raise ValueError(f"model_inputs has {', '.join(unknown)}, which nothing of this model reads; {taken}")
