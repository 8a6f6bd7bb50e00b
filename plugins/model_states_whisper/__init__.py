"""Whisper: speech in, text out. The encoder runs once for each audio, beside the decoder's continuous batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_states import ModelState, hookimpl

if TYPE_CHECKING:
    from model_states_whisper.tokens import WhisperTokens

__all__ = ["WhisperTokens", "register_model_states"]


@hookimpl
def register_model_states() -> list[type[ModelState]]:
    """Whisper of every size; heavy imports wait until it is asked for."""
    from model_states_whisper.state import WhisperState

    return [WhisperState]


def __getattr__(name: str) -> Any:
    """Import `WhisperTokens` when it is first asked for."""
    if name == "WhisperTokens":
        from model_states_whisper.tokens import WhisperTokens

        return WhisperTokens
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
