"""Parts that a model state is composed of; each implements the hooks for its own caches and inputs."""

from model_states.components.paged_attention import AttentionLayer, PagedAttention
from model_states.components.recurrent_state import RecurrentLayer, RecurrentState
from model_states.components.saved_state import SavedState, StateKeeper, StatePart
from model_states.components.state_transfer import StateTransfer

__all__ = [
    "AttentionLayer",
    "PagedAttention",
    "RecurrentLayer",
    "RecurrentState",
    "SavedState",
    "StateKeeper",
    "StatePart",
    "StateTransfer",
]
