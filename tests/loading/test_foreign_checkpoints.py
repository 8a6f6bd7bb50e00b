"""A plugin that is named for another family's checkpoint says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import save_tiny

from core_runner import LLM
from model_states import UnsupportedModelError


@pytest.mark.parametrize("plugin", ["whisper", "seq2seq"])
def test_a_checkpoint_of_another_family_is_refused(plugin: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(UnsupportedModelError, match="a LlamaForCausalLM, which cannot be loaded as"):
        LLM(str(tmp_path), device="cpu", model_state=plugin)
