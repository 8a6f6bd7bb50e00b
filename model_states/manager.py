"""`PluginManager`: the plugins that can be used, those that cannot and why, and which one serves a
checkpoint.

A manager is an ordinary object, made where models are resolved: there is no global registry and no flag that
says "loaded once", so a worker process, spawned or forked, makes its own and finds the same plugins.

A plugin that cannot be used is a logged warning and a row with the reason, and nothing of it stays
registered; it becomes an error when a model needs it, when it was given by call, or under `strict`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from model_states import selection
from model_states.discovery import DISABLE_VARIABLE, Plugin, discover, given, refuse_conflicts
from model_states.errors import PluginError, UnsupportedModelError
from model_states.hook_checks import implemented_hooks
from model_states.hook_names import COLD_HOOKS, HOT_HOOKS
from model_states.hookspecs import PROJECT_NAME
from model_states.interface import ModelState

if TYPE_CHECKING:
    from model_states.config import CheckpointConfig, ModelConfig

EMBEDDED: Final = "embedded:"
"""What a model's name starts with when it is the one that a model state ships."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginRow:
    """What `core-runner plugins` says of one plugin; `error` is the reason of a broken one, else None."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]
    architectures: tuple[str, ...]
    model_states: tuple[str, ...]
    status: Literal["ok", "broken", "disabled"]
    error: str | None


class PluginManager:
    """Installed and given plugins, checked.

    autoload: find plugins by the entry-point group `model_states`, except those named in MODEL_STATES_DISABLE
    (a comma-separated list). plugins: modules or objects with cold hooks, beside those; they reach this
    process only. strict: raise the error of the first broken plugin instead of logging it.
    """

    def __init__(
        self, *, autoload: bool = True, plugins: Sequence[object] = (), strict: bool = False
    ) -> None:
        found = discover() if autoload else []
        self._plugins = refuse_conflicts([*found, *map(given, plugins)])
        for plugin in self._plugins:
            if plugin.error is None:
                continue
            if strict or plugin.by_call:
                raise plugin.error
            _log.warning("%s", plugin.error)

    def __reduce__(self) -> NoReturn:
        """Refuse to travel: plugins given by call would silently be missing on the other side."""
        raise PluginError(
            "a PluginManager cannot be sent to another process; make one there. A plugin given by call "
            f"reaches one process only: install it with an entry point of the group {PROJECT_NAME!r} instead"
        )

    @property
    def model_states(self) -> tuple[type[ModelState], ...]:
        """Every usable class, in the order of plugins."""
        return tuple(cls for plugin in self._plugins for cls in plugin.classes)

    def plugins(self) -> list[PluginRow]:
        """One row per plugin, broken and disabled ones too, sorted by distribution and name."""
        return [_row(plugin) for plugin in self._plugins]

    def select(self, checkpoint: CheckpointConfig, name: str | None = None) -> type[ModelState]:
        """The class that serves a checkpoint: the one named, else the one that claims it, else the fallback.

        Raises `UnsupportedModelError` if there is none or the chosen one declines, `PluginConflictError` if
        several claim it, and a broken plugin's own error if that one was asked for by name.
        """
        choice = self._choose(checkpoint, name)
        broken = self._broken() if choice.by_fallback else {}
        _log.log(
            logging.WARNING if broken else logging.INFO, "%s%s", choice.reason, selection.broken_note(broken)
        )
        return choice.model_state

    def construct(self, model_state: type[ModelState], config: ModelConfig) -> ModelState:
        """Load the model; a refusal names the broken plugins too, since one may be what is missing."""
        try:
            return model_state(config)
        except UnsupportedModelError as error:
            if not self._broken():
                raise
            raise UnsupportedModelError(f"{error}{selection.broken_note(self._broken())}") from error

    def explain(self, checkpoint: CheckpointConfig, name: str | None = None) -> str:
        """Which class `select` gives and why, in lines of text; raises what `select` raises."""
        choice = self._choose(checkpoint, name)
        owner = next(plugin for plugin in self._plugins if choice.model_state in plugin.classes)
        return selection.explanation(checkpoint, choice, owner.label, self._broken())

    def locate(self, model: str | None) -> str:
        """The directory or hub name behind what a user calls a model.

        None is the default embedded model and "embedded:NAME" the one that model state NAME ships; any other
        string is what it says. Raises `UnsupportedModelError` if there is no such embedded model.
        """
        if model is None:
            return str(self.default_embedded_model())
        if not model.startswith(EMBEDDED):
            return model
        return str(self.embedded_model(model.removeprefix(EMBEDDED)))

    def default_embedded_model(self) -> Path:
        """Directory of the model used when none is named: the fallback's, else that of the first class with
        one.

        Raises `UnsupportedModelError` if no plugin ships a model, or if its directory is missing.
        """
        shipping = self._shipping()
        if not shipping:
            raise UnsupportedModelError(
                f"no usable plugin ships an embedded model; name a model{self._missing_note()}"
            )
        return _shipped(min(shipping.values(), key=lambda cls: not cls.fallback))

    def embedded_model(self, name: str) -> Path:
        """Directory of the model that the model state of this name ships.

        Raises `UnsupportedModelError`, which lists those that ship one, if it does not, or if the directory is
        missing.
        """
        shipping = self._shipping()
        if name not in shipping:
            known = ", ".join(EMBEDDED + other for other in shipping) or "none"
            raise UnsupportedModelError(
                f"{EMBEDDED + name!r}: no usable model state {name!r} ships an embedded model; there are: "
                f"{known}{self._missing_note()}"
            )
        return _shipped(shipping[name])

    def embedded_for_task(self, task: str) -> tuple[str, str]:
        """Name ("embedded:NAME") of the model used for a task when none is named, and what to know of it first.

        Raises `UnsupportedModelError` if no plugin ships a model for the task.
        """
        for name, cls in self._shipping().items():
            if task in cls.embedded_tasks:
                return EMBEDDED + name, cls.embedded_tasks[task]
        raise UnsupportedModelError(
            f"no usable plugin ships an embedded model for {task}; name a model{self._missing_note()}"
        )

    def _shipping(self) -> dict[str, type[ModelState]]:
        return {cls.name: cls for cls in self.model_states if cls.embedded_model() is not None}

    def _choose(self, checkpoint: CheckpointConfig, name: str | None) -> selection.Choice:
        try:
            return selection.choose(self.model_states, self._broken(), checkpoint, name)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}{self._disabled_note()}") from error

    def _missing_note(self) -> str:
        return selection.broken_note(self._broken()) + self._disabled_note()

    def _disabled_note(self) -> str:
        names = ", ".join(plugin.name for plugin in self._plugins if plugin.disabled)
        return f". Switched off by {DISABLE_VARIABLE}: {names}" if names else ""

    def _broken(self) -> dict[str, PluginError]:
        return {plugin.name: plugin.error for plugin in self._plugins if plugin.error is not None}


def _shipped(cls: type[ModelState]) -> Path:
    path = cls.embedded_model()
    assert path is not None, "only asked of classes that ship a model"
    if not path.is_dir():
        raise UnsupportedModelError(
            f"model state {cls.name!r} declares an embedded model at {path}, which is no directory; reinstall its "
            "plugin, or name a model"
        )
    return path


def _row(plugin: Plugin) -> PluginRow:
    implemented = {hook for cls in plugin.classes for hook in implemented_hooks(cls)}
    return PluginRow(
        name=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        hooks=(*(COLD_HOOKS if plugin.classes else ()), *(hook for hook in HOT_HOOKS if hook in implemented)),
        architectures=tuple(sorted({name for cls in plugin.classes for name in cls.architectures})),
        model_states=tuple(cls.name for cls in plugin.classes),
        status="disabled" if plugin.disabled else "ok" if plugin.error is None else "broken",
        error=None if plugin.error is None else str(plugin.error),
    )
