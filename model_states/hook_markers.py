"""Markers of hooks, and the versions of the contract."""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT_NAME: Final = "model_states"
API_VERSION: Final = 1
SUPPORTED_API_VERSIONS: Final = range(1, API_VERSION + 1)

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
