"""Checks of the hot hooks of a class: what pluggy ignores without a word is an error at class creation."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from model_states.errors import PluginHookError
from model_states.hook_names import HOT_HOOK_ARGUMENTS, HOT_HOOKS
from model_states.hookspecs import PROJECT_NAME


def implemented_hooks(cls: type) -> tuple[str, ...]:
    """Names of the hot hooks that a class implements itself, in the order of the specs."""
    return tuple(hook for hook in HOT_HOOKS if is_marked(inspect.getattr_static(cls, hook, None)))


def check_hooks(cls: type) -> None:
    """Raise `PluginHookError` if a hook of the class would be ignored or fail at its first call."""
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name in HOT_HOOK_ARGUMENTS:
            _check_implementation(cls, name, member)
        elif is_marked(member):
            closest = difflib.get_close_matches(name, HOT_HOOKS, n=1, cutoff=0.6)
            hint = f"closest: {closest[0]}" if closest else f"hooks: {', '.join(HOT_HOOKS)}"
            raise _hook_error(cls, name, f"is not a model_states hook ({hint}); rename it or drop the marker")


def is_marked(member: object) -> bool:
    """Whether a method, function or method wrapper carries the `hookimpl` marker."""
    function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    marker = f"{PROJECT_NAME}_impl"
    return inspect.isroutine(function) and (hasattr(member, marker) or hasattr(function, marker))


def _check_implementation(cls: type, hook: str, member: object) -> None:
    if not is_marked(member):
        raise _hook_error(cls, hook, "has the name of a hook but is not marked; add @hookimpl or rename it")
    if not inspect.isfunction(member):
        raise _hook_error(cls, hook, f"is a {type(member).__name__}; a hook is a plain method")
    options = getattr(member, f"{PROJECT_NAME}_impl")
    wrapper = bool(options.get("wrapper"))
    if options.get("hookwrapper") or options.get("specname") or options.get("optionalhook"):
        raise _hook_error(
            cls, hook, "uses hookwrapper, specname or optionalhook; only wrapper, tryfirst, trylast"
        )
    if wrapper and hook == "custom_sampler":
        raise _hook_error(
            cls, hook, "cannot be a wrapper: it is chained; return a sampler that wraps the given one"
        )
    if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member):
        raise _hook_error(cls, hook, "is async; hooks are plain calls")
    if inspect.isgeneratorfunction(member) != wrapper:
        fix = (
            "a wrapper must yield once"
            if wrapper
            else "it yields, so its body would never run: use wrapper=True"
        )
        raise _hook_error(cls, hook, fix)
    _check_arguments(cls, hook, member)


def _check_arguments(cls: type, hook: str, function: Callable[..., Any]) -> None:
    allowed = HOT_HOOK_ARGUMENTS[hook]
    signature = f"{hook}({', '.join(allowed)})"
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise _hook_error(cls, hook, f"takes {parameter}; name the arguments plainly, out of {signature}")
        if parameter.name not in allowed:
            closest = difflib.get_close_matches(parameter.name, allowed, n=1)
            hint = f" (closest: {closest[0]})" if closest else ""
            raise _hook_error(cls, hook, f"takes {parameter.name!r}{hint}, which {signature} has not")
        if parameter.default is not parameter.empty:
            raise _hook_error(
                cls, hook, f"gives {parameter.name} a default, which would never be used; drop it"
            )


def _hook_error(cls: type, name: str, what: str) -> PluginHookError:
    return PluginHookError(f"{cls.__module__}.{cls.__qualname__}: {name} {what}")
