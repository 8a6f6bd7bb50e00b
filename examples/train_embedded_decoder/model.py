"""The model's configuration and its loss, shared by training and evaluation."""

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config

MAX_POSITIONS = 2048


def build_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Deep and thin, which suits a model this small; 5.2 million parameters, a tenth of them embeddings."""
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|pad|>"),
        dtype="bfloat16",
    )


def build_generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    """Greedy, and stop at the end of a turn or of a text."""
    stops = [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
    return GenerationConfig(
        do_sample=False, eos_token_id=stops, pad_token_id=tokenizer.token_to_id("<|pad|>"), max_new_tokens=256
    )


def token_losses(hidden: torch.Tensor, embedding: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every next token, in float32: hidden [rows, len, width], labels [rows, len]."""
    logits = (hidden @ embedding.to(hidden.dtype).T).float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view_as(labels)


def weighted_loss(
    hidden: torch.Tensor, embedding: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The mean of the token losses, each counted by its weight."""
    return (token_losses(hidden, embedding, labels) * weights).sum() / weights.sum()


def batch_hidden(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states of all tokens but the last, which has no label."""
    return model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
