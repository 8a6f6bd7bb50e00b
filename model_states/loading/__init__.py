"""From a checkpoint's files to a module: transformers does the work, this package checks and explains."""

from model_states.loading.checkpoint import load_checkpoint_config
from model_states.loading.generation import GenerationDefaults, load_generation_config
from model_states.loading.model import load_transformers_model

__all__ = [
    "GenerationDefaults",
    "load_checkpoint_config",
    "load_generation_config",
    "load_transformers_model",
]
