"""Text-to-text models: an encoder reads one text, a decoder writes another."""

from __future__ import annotations

from model_states import ModelState, hookimpl


@hookimpl
def register_model_states() -> list[type[ModelState]]:
    """Encoder-decoder models of text; heavy imports wait until it is asked for."""
    from model_states_seq2seq.state import TextToTextState

    return [TextToTextState]
