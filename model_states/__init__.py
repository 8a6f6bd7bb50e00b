"""The contract between the common runner and model states; all that a plugin imports.

Names are imported on first use, so that a plugin's module, which needs `hookimpl` alone, loads without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model_states.batch import InputBatch, RemoveReason, RequestInputs, RequestView
    from model_states.binding import Hooks, bind
    from model_states.cache import CacheGroup, Caches, CacheTensor, GroupCache
    from model_states.config import CheckpointConfig, ModelConfig
    from model_states.errors import (
        CapabilityError,
        CheckpointError,
        ModelStateError,
        PluginConflictError,
        PluginError,
        PluginHookError,
        PluginLoadError,
        PluginVersionError,
        UnsupportedModelError,
    )
    from model_states.hookspecs import API_VERSION, hookimpl, hookspec
    from model_states.interface import CAPABILITIES, Component, ModelState
    from model_states.logits_processor import LogitsProcessor, LogitsRows
    from model_states.manager import PluginManager, PluginRow
    from model_states.sampler import Sampler, SamplerOutput

_HOMES = {
    "batch": ("InputBatch", "RemoveReason", "RequestInputs", "RequestView"),
    "binding": ("Hooks", "bind"),
    "cache": ("CacheGroup", "CacheTensor", "Caches", "GroupCache"),
    "config": ("CheckpointConfig", "ModelConfig"),
    "errors": (
        "CapabilityError",
        "CheckpointError",
        "ModelStateError",
        "PluginConflictError",
        "PluginError",
        "PluginHookError",
        "PluginLoadError",
        "PluginVersionError",
        "UnsupportedModelError",
    ),
    "hookspecs": ("API_VERSION", "hookimpl", "hookspec"),
    "interface": ("CAPABILITIES", "Component", "ModelState"),
    "logits_processor": ("LogitsProcessor", "LogitsRows"),
    "manager": ("PluginManager", "PluginRow"),
    "sampler": ("Sampler", "SamplerOutput"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "CacheGroup",
    "CacheTensor",
    "Caches",
    "CapabilityError",
    "CheckpointConfig",
    "CheckpointError",
    "Component",
    "GroupCache",
    "Hooks",
    "InputBatch",
    "LogitsProcessor",
    "LogitsRows",
    "ModelConfig",
    "ModelState",
    "ModelStateError",
    "PluginConflictError",
    "PluginError",
    "PluginHookError",
    "PluginLoadError",
    "PluginManager",
    "PluginRow",
    "PluginVersionError",
    "RemoveReason",
    "RequestInputs",
    "RequestView",
    "Sampler",
    "SamplerOutput",
    "UnsupportedModelError",
    "bind",
    "hookimpl",
    "hookspec",
]


def __getattr__(name: str) -> Any:
    """Import an exported name from its module when it is first asked for."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'model_states' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"model_states.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Names of the contract."""
    return sorted(__all__)
