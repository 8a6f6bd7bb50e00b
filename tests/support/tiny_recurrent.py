"""Tiny random models with recurrent layers, and the oracle for them: full recomputation of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.reference import Reference

_COMMON = {
    "vocab_size": 211,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_HEADS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

# name -> (transformers' model type, options over _COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"state_size": 6, "intermediate_size": 64, "time_step_rank": 5}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 6, "intermediate_size": 64, "time_step_rank": 5}),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 12,
            "chunk_size": 16,
            "time_step_limit": (0.05, 2.0),
        },
    ),
    "bamba": ("bamba", {**_ATTENTION, **_HEADS, "attn_layer_indices": [1, 3]}),
    "jamba": (
        "jamba",
        {
            **_ATTENTION,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 6,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 5,
            "use_mamba_kernels": False,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_ATTENTION,
            "head_dim": 8,
            "layers_block_type": ["mamba", "moe", "attention", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 12,
            "conv_kernel": 4,
            "chunk_size": 16,
            "time_step_min": 0.3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_ATTENTION,
            **_HEADS,
            "mamba_n_groups": 1,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
        },
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        {
            **_ATTENTION,
            **_HEADS,
            "mamba_n_groups": 1,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 24,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_ATTENTION,
            **_HEADS,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 1.1,
        },
    ),
    "falcon_h1_gated": (
        "falcon_h1",
        {**_ATTENTION, **_HEADS, "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_rms_norm": False},
    ),
    "zamba2": (
        "zamba2",
        {
            **_ATTENTION,
            "initializer_range": 0.15,
            "num_key_value_heads": 4,
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
            "num_mem_blocks": 2,
            "mamba_d_state": 12,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "chunk_size": 16,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "time_step_min": 0.1,
        },
    ),
}


def build_tiny(name: str, **overrides: Any) -> Any:
    """The model of one `TINY` entry with seeded weights, fp32, on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = TINY[name]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **options, **overrides})
    torch.manual_seed(len(name) * 1009 + sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        # Norms and biases start at ones and zeros, where a lost one would not show.
        if parameter.dim() <= 1 or "A_log" in parameter_name:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


@torch.no_grad()
def recomputed_reference(model: Any, prompt: Sequence[int], max_tokens: int) -> Reference:
    """Greedy tokens, each from a full recomputation of everything before it, without any cache."""
    tokens, rows = list(prompt), []
    for _ in range(max_tokens):
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1]
        rows.append(torch.log_softmax(logits.float(), -1).cpu())
        tokens.append(int(rows[-1].argmax()))
    return Reference(tokens[len(prompt) :], torch.stack(rows))


@torch.no_grad()
def retraced_reference(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Reference:
    """What greedy decoding gives before each of `tokens`, from one pass over prompt and tokens without any cache.

    Where the tokens are those of `recomputed_reference`, so is the result, in a fraction of the time.
    """
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    logprobs = torch.log_softmax(logits.float(), -1).cpu()
    return Reference(logprobs.argmax(-1).tolist(), logprobs)


def save_tiny(name: str, directory: Path, **overrides: Any) -> Any:
    """Save the model as a checkpoint and give it back."""
    model = build_tiny(name, **overrides)
    model.save_pretrained(directory)
    return model
