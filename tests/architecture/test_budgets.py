"""Size budgets: what keeps the core small is a failing test, not a comment that asks for restraint."""

from __future__ import annotations

import ast

from source_tree import ROOTS, files, functions, is_kernel, name_of, num_branches, num_lines, tree_of

MAX_FUNCTION, MAX_KERNEL = 60, 120
MAX_FILE, MAX_KERNEL_FILE = 300, 400
RUNNER = ROOTS["core_runner"] / "runner.py"


def lengths_by_place():
    return {
        f"{name_of(path)}:{function.lineno} {function.name}": (num_lines(function), is_kernel(function))
        for path in files()
        for function in functions(path)
    }


def test_half_of_the_functions_are_short_and_nine_of_ten_moderate():
    lengths = sorted(length for length, _ in lengths_by_place().values())
    assert lengths[len(lengths) // 2] <= 10
    assert lengths[len(lengths) * 9 // 10] <= 30


def test_no_function_is_long():
    limits = {True: MAX_KERNEL, False: MAX_FUNCTION}
    long = {place: n for place, (n, kernel) in lengths_by_place().items() if n > limits[kernel]}
    assert long == {}


def test_no_file_is_long():
    long = {}
    for path in files():
        num_lines_of_file = len(path.read_text(encoding="utf-8").splitlines())
        has_kernel = any(is_kernel(function) for function in functions(path))
        if num_lines_of_file > (MAX_KERNEL_FILE if has_kernel else MAX_FILE):
            long[name_of(path)] = num_lines_of_file
    assert long == {}


def test_runner_stays_small():
    assert len(RUNNER.read_text(encoding="utf-8").splitlines()) <= 400
    step = {f.name: f for f in functions(RUNNER) if f.name in ("execute_model", "sample_tokens")}
    assert set(step) == {"execute_model", "sample_tokens"}
    assert sum(map(num_branches, step.values())) <= 12


def test_runner_asks_no_object_what_it_is():
    """Probing a model state is how model names leak into a common runner."""
    probes = ("hasattr", "getattr", "isinstance", "type")
    calls = [node for node in ast.walk(tree_of(RUNNER)) if isinstance(node, ast.Call)]
    assert [ast.unparse(call) for call in calls if ast.unparse(call.func) in probes] == []


def test_branches_are_counted():
    source = "def f(a):\n if a and b or c:\n  return [x for x in a if x]\n return 1 if a else 2\n"
    assert num_branches(ast.parse(source).body[0]) == 1 + 2 + 1 + 1
