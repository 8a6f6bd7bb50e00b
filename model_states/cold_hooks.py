"""The cold hooks of the contract; `model_states.hookspecs` holds them together with the hot ones."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING

from model_states.hook_markers import hookspec

if TYPE_CHECKING:
    from model_states.interface import ModelState


class ColdHooks:
    """Hooks of a plugin's module."""

    @hookspec
    def register_model_states(self) -> list[type[ModelState]]:
        """Name the model states that this plugin brings.

        Called once by each plugin manager, so once in every process that loads models.

        :returns: classes, not instances; an empty list is allowed. None counts as an empty list.

        Must not load weights, touch a device, or register anything elsewhere. A module keeps heavy imports
        inside this function, so that a broken dependency is reported as this plugin's.

        .. versionadded:: 0.1
        """
