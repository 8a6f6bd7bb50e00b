"""Errors of the contract: each says who, what and how to fix.

ModelStateError
├── PluginError               something about an installed plugin
│   ├── PluginLoadError       it failed to import, and the chosen model needs it
│   ├── PluginConflictError   two plugins share a name, or two model states claim one model
│   ├── PluginHookError       a misspelt hook, an unmarked override or wrong arguments
│   └── PluginVersionError    its api_version is outside the supported range
├── UnsupportedModelError     no installed model state can serve this model rightly
├── CapabilityError           a feature was asked for that the model state does not have
└── CheckpointError           files of a checkpoint that are missing, incomplete or contradictory
"""


class ModelStateError(ValueError):
    """Base class of every error of the model-state boundary."""


class PluginError(ModelStateError):
    """Something is wrong with an installed plugin."""


class PluginLoadError(PluginError):
    """A plugin failed to import and the chosen model needs it."""


class PluginConflictError(PluginError):
    """Two plugins share a name, or two model states claim the same model."""


class PluginHookError(PluginError):
    """A hook implementation that is misspelt, unmarked or has arguments that the spec has not."""


class PluginVersionError(PluginError):
    """A model state written for a version of the contract that this release does not speak."""


class UnsupportedModelError(ModelStateError):
    """No installed model state can serve this model rightly."""


class CapabilityError(ModelStateError):
    """A feature was asked for explicitly that the chosen model state does not have."""


class CheckpointError(ModelStateError):
    """Files of a checkpoint that are missing, incomplete or contradictory."""
