"""Public things say what they are, and every hook has its page and its tests."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re

import pytest
from source_tree import REPOSITORY, files, functions, is_kernel, name_of, tree_of

from model_states.hook_names import COLD_HOOKS, HOT_HOOKS, hook_functions
from model_states.hookspecs import ColdHooks, HotHooks

HOOKS = {**hook_functions(ColdHooks), **hook_functions(HotHooks)}
PAGE = REPOSITORY / "docs" / "hooks.md"


def is_public(name):
    return not name.startswith("_")


def undocumented(path):
    """Public functions, classes and methods of public classes without a docstring."""
    tree = tree_of(path)
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and is_public(node.name))]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for scope in scopes:
        for node in scope.body:
            if isinstance(node, kinds) and is_public(node.name) and ast.get_docstring(node) is None:
                yield f"{name_of(path)}:{node.lineno} {node.name}"


def test_public_functions_classes_and_modules_have_docstrings():
    missing = [place for path in files() for place in undocumented(path)]
    missing += [name_of(path) for path in files() if ast.get_docstring(tree_of(path)) is None]
    assert missing == []


def test_every_argument_and_result_is_annotated():
    missing = []
    for path in files("core_runner", "model_states"):
        for function in functions(path):
            if is_kernel(function):
                continue
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if bare or (function.returns is None):
                missing.append(f"{name_of(path)}:{function.lineno} {function.name} {bare or 'result'}")
    assert missing == []


def test_no_unfinished_work():
    pattern = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    found = [
        f"{name_of(p)}: {m.group()}" for p in files() for m in pattern.finditer(p.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_hooks_page_is_what_the_specs_say():
    spec = importlib.util.spec_from_file_location("generate_hooks", REPOSITORY / "docs" / "generate_hooks.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert PAGE.read_text(encoding="utf-8") == generator.page(), "run python docs/generate_hooks.py"


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_a_section_with_its_signature(hook):
    text = PAGE.read_text(encoding="utf-8")
    names = list(inspect.signature(HOOKS[hook]).parameters)[1:]
    section = text.split(f"### {hook}\n", 1)[1].split("\n### ", 1)[0]
    for name in names:
        assert f"{name}: " in section.split("```")[1]
        assert f"- `{name}`: " in section


@pytest.mark.parametrize("hook", HOOKS)
def test_spec_docstring_keeps_the_grammar(hook):
    function = HOOKS[hook]
    parts = inspect.getdoc(function).split("\n\n")
    assert re.match(r"[A-Z][^\n]*\.$", parts[0]), "what it does, in one line"
    assert parts[1].startswith("Called "), "when"
    if hook in HOT_HOOKS:
        assert re.search(r"capture|at load", parts[1]), "whether during capture"
    documented = re.findall(r"^:param (\w+):", parts[2], re.MULTILINE)
    assert documented == list(inspect.signature(function).parameters)[1:]
    assert ":returns:" in parts[2]
    if function.__annotations__["return"] != "None":
        assert "None" in parts[2], "what None means"
    assert parts[3].startswith("Must not ") or " must not " in parts[3] or "Must " in parts[3]
    assert re.match(r"\.\. versionadded:: \d+\.\d+$", parts[-1])
    assert "return" in function.__annotations__


@pytest.mark.parametrize("hook", [*COLD_HOOKS, *HOT_HOOKS])
def test_hook_is_exercised_by_a_test(hook):
    word = re.compile(rf"\b{hook}\b")
    here = REPOSITORY / "tests" / "architecture"
    tests = [p for p in (REPOSITORY / "tests").rglob("test_*.py") if p.parent != here]
    assert any(word.search(path.read_text(encoding="utf-8")) for path in tests)


def test_every_hot_hook_is_called_by_the_core():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files("core_runner"))
    assert [hook for hook in HOT_HOOKS if not re.search(rf"hooks\.{hook}\b", sources)] == []


def test_no_environment_variables_but_the_named_ones():
    # The last is Triton's own.
    allowed = {"MODEL_STATES_DISABLE", "MODEL_STATES_TRACE", "TRITON_INTERPRET"}
    pattern = re.compile(r"(?:environ(?:\.get)?|getenv)[\[(]\s*([\w\"']+)")
    names = set()
    for path in files():
        names |= set(pattern.findall(path.read_text(encoding="utf-8")))
    assert {name.strip("\"'") for name in names} - allowed - {"DISABLE_VARIABLE"} == set()
