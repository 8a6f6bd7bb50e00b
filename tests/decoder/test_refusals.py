"""What paged attention would serve wrongly is refused by name; what it was never tested on is checked at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.drained import Drained
from support.reference import assert_wholly_exact, greedy_reference

from core_runner import LLM, SamplingParams
from model_states import UnsupportedModelError
from model_states.components import PagedAttention

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _save(directory: Path, model_type: str, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_SMALL, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory)
    return model


REFUSED = {
    "state in other layers": (
        "bamba",
        {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16},
        "Bamba",
    ),
    "no attention at all": ("mamba", {"state_size": 4}, "Mamba"),
    "attention biases by distance": ("bloom", {"n_head": 2, "n_layer": 2}, "Bloom"),
    "chunked attention": (
        "llama4_text",
        {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 16},
        "Llama4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    model_type, options, name = REFUSED[case]
    _save(tmp_path, model_type, **options)
    with pytest.raises(UnsupportedModelError, match=name):
        LLM(str(tmp_path), device="cpu", model_state="decoder")


def test_rope_that_depends_on_the_batch_is_refused_beyond_its_limit(tmp_path: Path) -> None:
    """One request past the limit would change the frequencies of its neighbours."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    _save(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=32)
    with pytest.raises(UnsupportedModelError, match=r"Phi3ForCausalLM.*'longrope'.*max_model_len=32 or less"):
        LLM(str(tmp_path), device="cpu")
    assert LLM(str(tmp_path), device="cpu", max_model_len=32).generate([[5, 6]])[0].finished


@pytest.mark.parametrize("model_type", ["starcoder2", "stablelm", "olmo"])
def test_an_untested_architecture_is_checked_and_exact(
    model_type: str, tmp_path: Path, drained: Drained
) -> None:
    model = _save(tmp_path, model_type)
    llm = drained(str(tmp_path), device="cpu", block_size=4, max_num_batched_tokens=7)
    prompt = [5, 9, 33, 8, 71, 20, 14, 3, 60, 2, 11]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
    assert_wholly_exact(
        llm.generate([prompt], params)[0].outputs[0], greedy_reference(model, prompt, 10), model_type
    )


def test_the_check_at_load_notices_state_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, "starcoder2")
    prepare = PagedAttention.prepare_attn

    def forgets_the_first_chunk(self: PagedAttention, batch: Any) -> None:
        batch.block_tables = tuple(table.flip(1) for table in batch.block_tables)
        prepare(self, batch)

    monkeypatch.setattr(PagedAttention, "prepare_attn", forgets_the_first_chunk)
    with pytest.raises(UnsupportedModelError, match="Starcoder2ForCausalLM gives other hidden states"):
        LLM(str(tmp_path), device="cpu", block_size=4)
