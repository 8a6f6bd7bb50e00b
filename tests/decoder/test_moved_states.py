"""The state of a request moves for any components: here a decoder's, with windows, soft caps and latent caches."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from model_states_decoder.state import DecoderState
from support.drained import Drained
from support.moved_states import PROMPT, check_it_goes_on, check_it_may_be_pushed_out, kept, two_engines
from support.recurrent_exact import TinyRecurrent
from support.tiny_models import save_tiny

from model_states import ModelConfig, ModelState, hookimpl
from model_states.components import PagedAttention, StatePart, StateTransfer


class MovingDecoder(DecoderState):
    """A decoder whose requests bring their state."""

    name: ClassVar[str] = "moving"
    fallback: ClassVar[bool] = False
    architectures: ClassVar[tuple[str, ...]] = ()
    capabilities: ClassVar[frozenset[str]] = DecoderState.capabilities | {"restore"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        parts: list[StatePart] = [c for c in self.components if isinstance(c, PagedAttention)]
        self.components = [*parts, StateTransfer(parts)]


class MovingPlugin:
    """Brings it."""

    @hookimpl
    def register_model_states(self) -> list[type[ModelState]]:
        return [MovingDecoder]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_a_conversation_goes_on_elsewhere(name: str, drained: Drained, tmp_path: Path) -> None:
    model = TinyRecurrent(name, tmp_path, save_tiny)
    here, there = two_engines(
        drained, model, model_options={}, plugins=[MovingPlugin()], model_state="moving"
    )
    check_it_goes_on(model, here, there, tmp_path)
    check_it_may_be_pushed_out(model, here, there)


def test_a_window_takes_no_more_than_it_sees(drained: Drained, tmp_path: Path) -> None:
    """Eight of 70 tokens are seen by the next one, itself not counted."""
    model = TinyRecurrent("mistral", tmp_path, save_tiny)
    here, _ = two_engines(drained, model, model_options={}, plugins=[MovingPlugin()], model_state="moving")
    state = kept(here, PROMPT[:66])
    assert {name: tuple(tensor.shape) for name, tensor in state.tensors.items()} == {
        f"attention.{layer}.{part}": (8, 2, 12) for layer in range(2) for part in ("key", "value")
    }
