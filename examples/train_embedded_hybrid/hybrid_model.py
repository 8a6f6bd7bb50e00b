"""The hybrid's configuration, and first weights that remember: Mamba-2 layers with attention at two of eight."""

import math

import paths  # noqa: F401  (finds the decoder's modules)
import torch
from model import MAX_POSITIONS, build_generation_config
from ssd import train_in_chunks
from tokenizers import Tokenizer
from torch import nn
from transformers import BambaConfig, BambaForCausalLM

ATTENTION_LAYERS = [2, 5]
TRAINING_CHUNK = 64


def build_config(tokenizer: Tokenizer) -> BambaConfig:
    """The embedded decoder's width, depth, heads and vocabulary; 5.9 million parameters."""
    return BambaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=8,
        attn_layer_indices=ATTENTION_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        # No clamp: transformers applies one to prefills and not to single tokens.
        time_step_limit=(0.0, float("inf")),
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|pad|>"),
        dtype="bfloat16",
    )


def build_model(tokenizer: Tokenizer, device: torch.device) -> BambaForCausalLM:
    """A model to train, in float32, whose mixers have the chunked forward."""
    model = BambaForCausalLM._from_config(build_config(tokenizer), dtype=torch.float32)
    model.generation_config = build_generation_config(tokenizer)
    mixers = [layer.mamba for layer in model.model.layers if hasattr(layer, "mamba")]
    for mixer in mixers:
        remember(mixer)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                weight /= math.sqrt(2 * len(model.model.layers))
    train_in_chunks(mixers, TRAINING_CHUNK)
    return model.to(device)


@torch.no_grad()
def remember(mixer: nn.Module) -> None:
    """Mamba-2's own first decays: time steps from 0.001 to 0.1, of rates from 1 to 16.

    transformers' start from a time step of 1.3, which forgets a token within a few others.
    """
    steps = torch.empty_like(mixer.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    mixer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the step back
    mixer.A_log.copy_(torch.empty_like(mixer.A_log).uniform_(1.0, 16.0).log())
