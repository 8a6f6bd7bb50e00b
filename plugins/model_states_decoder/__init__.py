"""Decoder-only language models: any transformers causal LM whose only state is causal self-attention."""

from __future__ import annotations

from model_states import ModelState, hookimpl


@hookimpl
def register_model_states() -> list[type[ModelState]]:
    """The default decoder; heavy imports wait until it is asked for."""
    from model_states_decoder.state import DecoderState

    return [DecoderState]
