"""Which model state serves a checkpoint, and why: by name, else the one claim, else the fallback."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_states.errors import CapabilityError, PluginConflictError, PluginError, UnsupportedModelError
from model_states.interface import CAPABILITIES, ModelState

if TYPE_CHECKING:
    from model_states.config import CheckpointConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen class, the reason in one sentence, and whether nobody had claimed the checkpoint."""

    model_state: type[ModelState]
    reason: str
    by_fallback: bool = False


def choose(
    classes: Sequence[type[ModelState]],
    broken: Mapping[str, PluginError],
    checkpoint: CheckpointConfig,
    name: str | None = None,
) -> Choice:
    """Choose one of `classes` for a checkpoint. `broken` holds the errors of plugins that could not be
    loaded: any of them may be the one that is missing, so they are named when nothing else fits.
    """
    if name is not None:
        choice = _by_name(classes, broken, checkpoint, name)
    else:
        choice = _by_claim(classes, broken, checkpoint) or _by_fallback(classes, broken, checkpoint)
    reason = choice.model_state.unsupported(checkpoint)
    if reason is not None:
        note = broken_note(broken) if name is None else ""
        raise UnsupportedModelError(
            f"model state {choice.model_state.name!r} cannot serve {_what(checkpoint)}: {reason}{note}"
        )
    return choice


def check_capability(model_state: type[ModelState], capability: str, *, chosen: bool) -> bool:
    """Whether the model state has a capability of `CAPABILITIES`.

    chosen: the user asked for the feature, or for this plugin, by name; then a missing capability is a
    `CapabilityError`, otherwise it is logged and the feature stays off.
    """
    if capability in model_state.capabilities:
        return True
    missing = f"model state {model_state.name!r} has no {capability} ({CAPABILITIES[capability]})"
    if chosen:
        raise CapabilityError(
            f"{missing}; it has: {', '.join(sorted(model_state.capabilities)) or 'none'}. Switch it off"
        )
    _log.warning("%s; it stays off", missing)
    return False


def broken_note(broken: Mapping[str, PluginError]) -> str:
    """The sentence that names broken plugins as a possible reason; empty if there is none."""
    if not broken:
        return ""
    return ". Not usable, and perhaps what is missing: " + "; ".join(str(error) for error in broken.values())


def explanation(
    checkpoint: CheckpointConfig, choice: Choice, owner: str, broken: Mapping[str, PluginError]
) -> str:
    """Lines that say what was chosen, why, and what it cannot do."""
    cls = choice.model_state
    lines = [
        f"model: {checkpoint.model}",
        f"architecture: {checkpoint.architecture}",
        f"model state: {cls.name} ({cls.__module__}.{cls.__qualname__}) of {owner}",
        f"why: {choice.reason}",
        f"capabilities: {', '.join(sorted(cls.capabilities)) or 'none'}",
    ]
    missing = [
        f"  {name}: {meaning}" for name, meaning in CAPABILITIES.items() if name not in cls.capabilities
    ]
    lines += ["missing, so switched off unless asked for, then refused:", *missing] if missing else []
    lines += (
        ["plugins that could not be used:", *(f"  {error}" for error in broken.values())] if broken else []
    )
    return "\n".join(lines)


def _by_name(
    classes: Sequence[type[ModelState]],
    broken: Mapping[str, PluginError],
    checkpoint: CheckpointConfig,
    name: str,
) -> Choice:
    for cls in classes:
        if cls.name == name:
            return Choice(cls, f"model state {name!r} was asked for by name for {_what(checkpoint)}")
    if name in broken:
        raise broken[name]
    closest = difflib.get_close_matches(name, [cls.name for cls in classes], n=1)
    hint = f" Did you mean {closest[0]!r}?" if closest else ""
    raise UnsupportedModelError(
        f"no model state is named {name!r}.{hint} {_installed(classes)}{broken_note(broken)}"
    )


def _by_claim(
    classes: Sequence[type[ModelState]], broken: Mapping[str, PluginError], checkpoint: CheckpointConfig
) -> Choice | None:
    claims = [cls for cls in classes if _claims(cls, checkpoint)]
    if len(claims) > 1:
        raise _ambiguous(claims, f"claim {_what(checkpoint)}")
    return Choice(claims[0], f"model state {claims[0].name!r} claims {_what(checkpoint)}") if claims else None


def _by_fallback(
    classes: Sequence[type[ModelState]], broken: Mapping[str, PluginError], checkpoint: CheckpointConfig
) -> Choice:
    fallbacks = [cls for cls in classes if cls.fallback]
    if len(fallbacks) > 1:
        raise _ambiguous(fallbacks, f"are fallbacks for {_what(checkpoint)}, which nobody claims")
    if not fallbacks:
        raise UnsupportedModelError(
            f"no model state for {_what(checkpoint)}. {_installed(classes)}{broken_note(broken)}"
        )
    reason = f"nobody claims {_what(checkpoint)}, so it falls to the fallback {fallbacks[0].name!r}"
    return Choice(fallbacks[0], reason, by_fallback=True)


def _claims(cls: type[ModelState], checkpoint: CheckpointConfig) -> bool:
    """A class's answer; one that fails on a foreign config must not keep others from answering."""
    try:
        return bool(cls.claims(checkpoint))
    except Exception as error:
        _log.warning(
            "model state %r failed to answer whether it claims %s: %r", cls.name, _what(checkpoint), error
        )
        return False


def _ambiguous(classes: Sequence[type[ModelState]], what: str) -> PluginConflictError:
    names = " and ".join(f"{cls.name!r} ({cls.__module__}.{cls.__qualname__})" for cls in classes)
    return PluginConflictError(
        f"model states {names} {what}; name one of them with model_state={classes[0].name!r}"
    )


def _what(checkpoint: CheckpointConfig) -> str:
    return f"architecture {checkpoint.architecture!r}"


def _installed(classes: Sequence[type[ModelState]]) -> str:
    listed = [
        f"{cls.name} [{', '.join(cls.architectures) or ('any' if cls.fallback else 'by claim')}]"
        for cls in classes
    ]
    return f"Installed: {', '.join(listed) or 'none'}. Install a plugin for it" + (
        f", or pass model_state={classes[0].name!r} to force one" if classes else ""
    )
