"""Random weights from config.json alone: seeded, scaled, and with the buffers of a real model."""

import pytest
import torch
from tiny_checkpoints import SIZES, load, save_tiny
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)


@pytest.fixture
def config_only(tmp_path):
    model = save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return tmp_path, model


def test_weights_repeat_and_leave_the_callers_random_state(config_only):
    directory, _ = config_only
    first = load(directory, load_format="dummy")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    second = load(directory, load_format="dummy")
    assert torch.equal(torch.rand(3), expected)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_scale_norms_dtype_and_mode(config_only):
    directory, _ = config_only
    model = load(directory, load_format="dummy", dtype=torch.bfloat16)
    assert not model.training
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert not parameter.requires_grad
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert 0.018 < parameter.float().std() < 0.022, name
            assert abs(parameter.float().mean()) < 0.003, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_buffers_are_those_of_a_loaded_model(tmp_path, rope, dtype):
    save_tiny(tmp_path, model=LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)))
    dummy = dict(load(tmp_path, load_format="dummy", dtype=dtype).named_buffers())
    loaded = dict(load(tmp_path, dtype=dtype).named_buffers())
    assert dummy.keys() == loaded.keys()
    assert dummy["model.rotary_emb.inv_freq"].dtype == torch.float32
    for name, buffer in loaded.items():
        assert torch.equal(dummy[name], buffer), name
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, 8, 2, dtype=torch.float32) / 8
        torch.testing.assert_close(dummy["model.rotary_emb.inv_freq"], 5e5**-exponents)


def test_vectors_that_start_random_repeat_too(tmp_path):
    sizes = {**SIZES, "num_hidden_layers": 1, "num_local_experts": 4, "head_dim": 8}
    save_tiny(tmp_path, model=GptOssForCausalLM(GptOssConfig(**sizes)))
    sinks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        sinks.append(load(tmp_path, "eager", load_format="dummy").model.layers[0].self_attn.sinks)
    assert sinks[0].std() > 0
    assert torch.equal(*sinks)


def test_a_tied_head_stays_tied(tmp_path):
    save_tiny(tmp_path, tied=True)
    model = load(tmp_path, load_format="dummy")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "model",
    [
        lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=32, n_layer=1, n_head=4, n_positions=32)),
    ],
)
def test_every_matrix_is_filled(tmp_path, model):
    save_tiny(tmp_path, model=model())
    dummy = load(tmp_path, load_format="dummy")
    for name, parameter in dummy.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.ndim == 1 or 0.015 < parameter.std() < 0.025, name
    assert torch.isfinite(dummy(torch.tensor([[1, 2, 3]])).logits).all()
