"""Finding plugins, loading each one in isolation, and checking what it brings.

Every plugin is tried in a pluggy manager of its own, which is thrown away: one that fails half-way has left
nothing behind in the others.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pluggy

from model_states.errors import (
    PluginConflictError,
    PluginError,
    PluginHookError,
    PluginLoadError,
    PluginVersionError,
)
from model_states.hook_checks import is_marked
from model_states.hook_names import COLD_HOOKS
from model_states.hookspecs import PROJECT_NAME, SUPPORTED_API_VERSIONS, ColdHooks
from model_states.interface import CAPABILITIES, ModelState

DISABLE_VARIABLE: Final = "MODEL_STATES_DISABLE"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin as found. A broken one has an error and no classes, a disabled one has neither."""

    name: str
    distribution: str
    version: str
    module: str
    classes: tuple[type[ModelState], ...] = ()
    error: PluginError | None = None
    by_call: bool = False
    disabled: bool = False

    @property
    def label(self) -> str:
        """Who it is, for messages."""
        source = "" if self.by_call else f" {self.version}, module {self.module}"
        return f"plugin {self.name!r} ({self.distribution}{source})"

    @property
    def skip_hint(self) -> str:
        """How to do without it."""
        return "or do not pass it" if self.by_call else f"or skip it with {DISABLE_VARIABLE}={self.name}"

    def broken(self, error: PluginError) -> Plugin:
        """The same plugin with nothing of it in use."""
        return replace(self, classes=(), error=error)


def discover() -> list[Plugin]:
    """Installed plugins, loaded and checked, sorted by distribution and name."""
    disabled = {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",")}
    found = sorted(_installed(), key=lambda pair: (pair[0].distribution, pair[0].name))
    names = Counter(plugin.name for plugin, _ in found)
    plugins = []
    for plugin, import_it in found:
        if plugin.name in disabled:
            plugin = replace(plugin, error=None, disabled=True)
        elif names[plugin.name] > 1:
            plugin = plugin.broken(_same_plugin_name([p for p, _ in found if p.name == plugin.name]))
        elif plugin.error is None:
            plugin = load(plugin, import_it)
        plugins.append(plugin)
    return plugins


def given(plugin: object) -> Plugin:
    """A module or object that was handed over by call, checked."""
    name = getattr(plugin, "__name__", type(plugin).__name__)
    described = Plugin(name, "given by call", "-", getattr(plugin, "__module__", name), by_call=True)
    return load(described, lambda: plugin)


def load(plugin: Plugin, import_it: Callable[[], object]) -> Plugin:
    """The plugin with its classes, or with the error that keeps it from being used."""
    try:
        return replace(plugin, classes=_registered_classes(import_it()))
    except PluginError as error:
        return plugin.broken(type(error)(f"{plugin.label}: {error}. Mend it, {plugin.skip_hint}."))
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error}"
        fix = f"Reinstall it, {plugin.skip_hint}."
        failure = PluginLoadError(f"{plugin.label} failed to import: {problem}. {fix}")
        failure.__cause__ = error
        return plugin.broken(failure)


def refuse_conflicts(plugins: Sequence[Plugin]) -> list[Plugin]:
    """Take out plugins whose model states share a name; a class that is found twice counts once."""
    seen: set[type[ModelState]] = set()
    unique = []
    for plugin in plugins:
        unique.append(replace(plugin, classes=tuple(c for c in plugin.classes if c not in seen)))
        seen.update(plugin.classes)
    names = Counter(cls.name for plugin in unique for cls in plugin.classes)
    return [_without_conflict(plugin, unique, names) for plugin in unique]


def _without_conflict(plugin: Plugin, plugins: Sequence[Plugin], names: Counter[str]) -> Plugin:
    for name in (cls.name for cls in plugin.classes if names[cls.name] > 1):
        owners = [
            f"{cls.__module__}.{cls.__qualname__} of {p.label}"
            for p in plugins
            for cls in p.classes
            if cls.name == name
        ]
        fix = f"Uninstall one, or disable it with {DISABLE_VARIABLE}"
        return plugin.broken(
            PluginConflictError(f"model state {name!r} is provided by {' and by '.join(owners)}. {fix}.")
        )
    return plugin


def _same_plugin_name(plugins: Sequence[Plugin]) -> PluginConflictError:
    owners = " and ".join(f"{p.distribution} {p.version}" for p in plugins)
    fix = f"Uninstall one, or disable both with {DISABLE_VARIABLE}={plugins[0].name}"
    return PluginConflictError(f"plugin name {plugins[0].name!r} is provided by {owners}. {fix}.")


def _installed() -> Iterator[tuple[Plugin, Callable[[], object]]]:
    """Every entry point of our group with what imports it. Distributions are read one by one, since a
    malformed entry_points.txt of any of them would end `importlib.metadata.entry_points()` for all.
    """
    seen = set()
    for distribution in importlib.metadata.distributions():
        if PROJECT_NAME not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name, version = (_metadata(distribution, field) for field in ("Name", "Version"))
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        if (
            normalized in seen
        ):  # a second copy further down sys.path, which Python would not import from either
            continue
        seen.add(normalized)
        try:
            points = distribution.entry_points.select(group=PROJECT_NAME)
        except Exception as error:
            plugin = Plugin(name, name, version, "unknown")
            problem = f"{plugin.label} has a malformed entry_points.txt: {error}. Reinstall it."
            yield plugin.broken(PluginLoadError(problem)), lambda: None
            continue
        for point in points:
            yield Plugin(point.name, name, version, point.value), point.load


def _metadata(distribution: importlib.metadata.Distribution, field: str) -> str:
    try:
        return distribution.metadata[field] or "unknown"
    except Exception:  # a damaged METADATA file must not hide the plugin
        return "unknown"


def _registered_classes(plugin: object) -> tuple[type[ModelState], ...]:
    """Classes that one plugin registers, checked; raises `PluginError` or whatever the plugin raises."""
    _check_cold_hooks(plugin)
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(ColdHooks)
    try:
        manager.register(plugin)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginHookError(f"{error}".replace("\n", " ")) from error
    classes: list[type[ModelState]] = []
    for result in manager.hook.register_model_states():
        if not isinstance(result, Iterable):
            raise PluginHookError(
                f"register_model_states returned {result!r}; return a list of ModelState classes"
            )
        classes.extend(result)
    for cls in classes:
        check_model_state(cls)
    return tuple(classes)


def _check_cold_hooks(plugin: object) -> None:
    if isinstance(plugin, type):
        raise PluginHookError(
            f"{plugin.__qualname__} is a class; a plugin is a module, or an object, with @hookimpl"
        )
    marked = [name for name in dir(plugin) if is_marked(inspect.getattr_static(plugin, name, None))]
    for name in marked:
        if name not in COLD_HOOKS:
            closest = difflib.get_close_matches(name, COLD_HOOKS, n=1, cutoff=0.0)[0]
            raise PluginHookError(f"{name} is not a hook of a module (closest: {closest})")
    if not marked:
        unmarked = hasattr(plugin, COLD_HOOKS[0])
        what = "does not mark" if unmarked else "does not define"
        raise PluginHookError(f"it {what} the hook {COLD_HOOKS[0]} with @hookimpl, so it brings nothing")


def check_model_state(cls: type[ModelState]) -> None:
    """Check a registered class; raises `PluginHookError` or `PluginVersionError`."""
    if not (isinstance(cls, type) and issubclass(cls, ModelState)):
        raise PluginHookError(
            f"register_model_states returned {cls!r}, which is not a subclass of ModelState"
        )
    who = f"{cls.__module__}.{cls.__qualname__}"
    if inspect.isabstract(cls):
        raise PluginHookError(f"{who} does not define {', '.join(sorted(cls.__abstractmethods__))}")
    for attribute, kind in (("name", str), ("api_version", int)):
        value = getattr(cls, attribute, None)
        if not isinstance(value, kind) or not value:
            raise PluginHookError(
                f"{who}: the class attribute `{attribute}` is {value!r}; declare it ({kind.__name__})"
            )
    if cls.api_version not in SUPPORTED_API_VERSIONS:
        low, high = SUPPORTED_API_VERSIONS[0], SUPPORTED_API_VERSIONS[-1]
        speaks = f"this release speaks {low}" + (f" to {high}" if high > low else "")
        raise PluginVersionError(
            f"{who} has api_version {cls.api_version}, {speaks}; install a matching release"
        )
    if isinstance(cls.architectures, str) or not all(isinstance(a, str) for a in cls.architectures):
        raise PluginHookError(f"{who}: architectures={cls.architectures!r} must be a tuple of class names")
    unknown = sorted(set(cls.capabilities) - set(CAPABILITIES))
    if unknown:
        raise PluginHookError(f"{who}: unknown capabilities {unknown}; known are {sorted(CAPABILITIES)}")
