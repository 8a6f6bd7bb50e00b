"""The source as the architecture tests read it: files, imports, functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOTS = {
    "core_runner": REPOSITORY / "core_runner",
    "model_states": REPOSITORY / "model_states",
    "plugins": REPOSITORY / "plugins",
}


def files(*roots: str) -> list[Path]:
    """Python files of some of the source roots, all of them by default."""
    return sorted(path for root in roots or ROOTS for path in ROOTS[root].rglob("*.py"))


def name_of(path: Path) -> str:
    """The path as messages show it."""
    return path.relative_to(REPOSITORY).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file, nested ones too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, docstring and comments included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it, or Gluon, which is Triton's lower level."""
    names = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any("triton" in name or "gluon" in name for name in names)


def imported_modules(path: Path) -> set[str]:
    """Dotted names of everything that a file imports anywhere, relative imports made absolute."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def num_branches(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Places where a function can go two ways: if, elif, loops, except, case, and, or, conditional, filter."""
    kinds = ast.If | ast.For | ast.While | ast.IfExp | ast.ExceptHandler | ast.match_case
    count = 0
    for node in ast.walk(function):
        count += isinstance(node, kinds)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count
