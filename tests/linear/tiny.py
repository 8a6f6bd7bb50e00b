"""Tiny random models with linear layers; the oracle is full recomputation, `support.tiny_recurrent`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

COMMON = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_CONVOLUTIONS = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
DELTA = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}

# name -> (transformers' model type, options over COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {**_CONVOLUTIONS, "conv_bias": False}),
    "lfm2_biased": ("lfm2", {**_CONVOLUTIONS, "conv_bias": True, "conv_L_cache": 5}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3_next": ("qwen3_next", {**DELTA, **_EXPERTS, "mlp_only_layers": [2]}),
    "qwen3_next_deep": (
        "qwen3_next",
        {**DELTA, **_EXPERTS, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2},
    ),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_only_linear": (
        "qwen3_5_text",
        {**DELTA, "layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **_EXPERTS}),
    "olmo_hybrid": ("olmo_hybrid", {**DELTA, "linear_num_value_heads": 2}),
}


def build_tiny(name: str, **overrides: Any) -> Any:
    """The model of one `TINY` entry with seeded weights, fp32, on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = TINY[name]
    config = AutoConfig.for_model(model_type, **{**COMMON, **options, **overrides})
    torch.manual_seed(len(name) * 1009 + sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        # Norms and biases start at ones and zeros, where a lost one would not show, and decays where all is forgotten.
        if parameter_name.endswith(("A_log", "dt_bias")):
            parameter.data = torch.randn(parameter.shape) - 1
        elif parameter.dim() <= 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def save_tiny(name: str, directory: Path, **overrides: Any) -> Any:
    """Save the model as a checkpoint and give it back."""
    model = build_tiny(name, **overrides)
    model.save_pretrained(directory)
    if name.startswith("olmo_hybrid"):
        _split_convolutions(model, directory / "model.safetensors")
    return model


def _split_convolutions(model: Any, path: Path) -> None:
    """Published files hold one convolution each for q, k and v; transformers' `save_pretrained` splits them wrongly."""
    tensors = {name: t for name, t in load_file(path).items() if "conv1d" not in name}
    for name, module in model.named_modules():
        if hasattr(module, "conv1d"):
            sizes = [module.key_dim, module.key_dim, module.value_dim]
            for part, weight in zip("qkv", module.conv1d.weight.data.split(sizes), strict=True):
                tensors[f"{name}.{part}_conv1d.weight"] = weight.clone()
    save_file(tensors, path, {"format": "pt"})
