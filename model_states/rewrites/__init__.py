"""Rewrites of a loaded transformers decoder: the same numbers from fewer kernels; see docs/rewrites.md."""

from model_states.rewrites.fuse import fuse_layers

__all__ = ["fuse_layers"]
