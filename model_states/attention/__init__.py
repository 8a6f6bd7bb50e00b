"""Paged attention behind one small interface, and the choice of who computes it."""

from model_states.attention.interface import AttentionBackend, AttentionMetadata, AttentionSpec
from model_states.attention.select import register_backend, select_backend
from model_states.attention.torch_backend import TorchAttention

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "TorchAttention",
    "register_backend",
    "select_backend",
]
