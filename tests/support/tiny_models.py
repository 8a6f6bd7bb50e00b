"""Tiny random models of real architectures, built in code and saved as ordinary checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_COMMON = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough that logits differ by more than the margin rule's 1e-3 nearly everywhere.
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

# name -> (transformers' model type, options over _COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    ),
    "phi3": ("phi3", {"sliding_window": 11}),
    "gpt2": ("gpt2", _GPT2),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 48, "init_std": 0.25}),
    "gpt_neox": ("gpt_neox", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 16}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "cohere2": ("cohere2", {"sliding_window": 10, "num_hidden_layers": 4, "logit_scale": 0.25}),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": ("deepseek_v2", {**_MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", _MLA),
}


def build_tiny(name: str, **overrides: Any) -> Any:
    """The model of one `TINY` entry with seeded weights, fp32, on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = TINY[name]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **options, **overrides})
    torch.manual_seed(len(name) * 1009 + sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _perturb_constants(model)
    return model


def _perturb_constants(model: Any) -> None:
    """Norms and biases start at ones and zeros, where a lost one would not show."""
    for name, parameter in model.named_parameters():
        if parameter.dim() <= 1 or "sinks" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape)


def save_tiny(name: str, directory: Path, **overrides: Any) -> Any:
    """Save the model as a checkpoint and give it back."""
    model = build_tiny(name, **overrides)
    model.save_pretrained(directory)
    return model
