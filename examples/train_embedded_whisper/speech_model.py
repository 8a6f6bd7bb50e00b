"""The model's configuration, a forward for training over transformers' modules, and the losses."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import WhisperConfig, WhisperForConditionalGeneration
from vocabulary import END_ID, FIRST_TIMESTAMP_ID, NUM_TEXT_TOKENS, NUM_TIMESTAMPS, START_ID, VOCAB_SIZE
from windows import IGNORED, Windows

GUIDED_HEAD = 0  # of each decoder layer


def build_config() -> WhisperConfig:
    """3.4 million parameters; heads of 64, as in every Whisper."""
    return WhisperConfig(
        vocab_size=VOCAB_SIZE,
        num_mel_bins=80,
        d_model=192,
        encoder_layers=4,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=1500,
        max_target_positions=448,
        dropout=0.0,
        pad_token_id=END_ID,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        decoder_start_token_id=START_ID,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        dtype="bfloat16",
    )


def build_model(init: Path | None = None) -> WhisperForConditionalGeneration:
    """The weights of a checkpoint; without one random, but for timestamps.

    Each timestamp starts as the encoder's embedding of the position that it names.
    """
    if init:
        model = WhisperForConditionalGeneration.from_pretrained(init, dtype=torch.float32)
        model.model.encoder.embed_positions.weight.requires_grad_(False)
        return model
    model = WhisperForConditionalGeneration._from_config(build_config(), dtype=torch.float32)
    positions = model.model.encoder.embed_positions.weight
    with torch.no_grad():
        rows = model.model.decoder.embed_tokens.weight[FIRST_TIMESTAMP_ID:]
        rows[:-1] += 0.02 * positions
        rows[-1] += 0.02 * positions[-1]
    positions.requires_grad_(False)  # sinusoids, and they stay it
    return model


class Attention(NamedTuple):
    """Queries and keys of one cross-attention's guided head, [rows, tokens or ticks, 64]."""

    queries: torch.Tensor
    keys: torch.Tensor


def encoder_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A layer of transformers' encoder."""
    normed = layer.self_attn_layer_norm(x)
    x = x + _attend(layer.self_attn, normed, normed)[0]
    return x + layer.fc2(functional.gelu(layer.fc1(layer.final_layer_norm(x))))


def decoder_layer(layer: nn.Module, x: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, Attention]:
    """A layer of transformers' decoder, and its guided head."""
    normed = layer.self_attn_layer_norm(x)
    x = x + _attend(layer.self_attn, normed, normed, causal=True)[0]
    attended, guided = _attend(layer.encoder_attn, layer.encoder_attn_layer_norm(x), encoded)
    x = x + attended
    return x + layer.fc2(functional.gelu(layer.fc1(layer.final_layer_norm(x)))), guided


def _attend(
    module: nn.Module, x: torch.Tensor, source: torch.Tensor, causal: bool = False
) -> tuple[torch.Tensor, Attention]:
    def heads(values: torch.Tensor) -> torch.Tensor:
        return values.view(*values.shape[:2], module.num_heads, module.head_dim).transpose(1, 2)

    queries, keys, values = (
        heads(module.q_proj(x)),
        heads(module.k_proj(source)),
        heads(module.v_proj(source)),
    )
    out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
    return module.out_proj(out.transpose(1, 2).flatten(2)), Attention(
        queries[:, GUIDED_HEAD], keys[:, GUIDED_HEAD]
    )


def encode(
    model: WhisperForConditionalGeneration,
    features: torch.Tensor,
    positions: torch.Tensor,
    run_layer: Callable = encoder_layer,
) -> torch.Tensor:
    """Hidden states [rows, ticks, width] of features [rows, 80, 2 * ticks] at positions [rows, ticks]."""
    encoder = model.model.encoder
    x = functional.gelu(encoder.conv2(functional.gelu(encoder.conv1(features)))).transpose(1, 2)
    x = x + encoder.embed_positions.weight[positions]
    for layer in encoder.layers:
        x = run_layer(layer, x)
    return encoder.layer_norm(x)


def decode(
    model: WhisperForConditionalGeneration,
    input_ids: torch.Tensor,
    encoded: torch.Tensor,
    run_layer: Callable = decoder_layer,
) -> tuple[torch.Tensor, list[Attention]]:
    """Hidden states [rows, tokens, width], and the guided head of each layer."""
    decoder = model.model.decoder
    x = decoder.embed_tokens(input_ids) + decoder.embed_positions.weight[: input_ids.shape[1]]
    guided = []
    for layer in decoder.layers:
        x, attention = run_layer(layer, x, encoded)
        guided.append(attention)
    return decoder.layer_norm(x), guided


class Losses(NamedTuple):
    """Nats: of a token, of a guided head's attention to where the token is heard, of a tick's token."""

    text: torch.Tensor
    attention: torch.Tensor
    frames: torch.Tensor


class Trainee(nn.Module):
    """The model, and a head on its encoder that says which token is spoken in a tick; only training needs that."""

    def __init__(self, model: WhisperForConditionalGeneration, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.frame_head = nn.Linear(model.config.d_model, NUM_TEXT_TOKENS + 1)
        self._encoder_layer, self._decoder_layer = encoder_layer, decoder_layer
        if compiled:
            self._encoder_layer = torch.compile(encoder_layer, dynamic=False)
            self._decoder_layer = torch.compile(decoder_layer, dynamic=False)

    def forward(self, windows: Windows) -> Losses:
        """The losses of a batch."""
        encoded = encode(self.model, windows.features, windows.positions, self._encoder_layer)
        hidden, guided = decode(self.model, windows.input_ids, encoded, self._decoder_layer)
        logits = functional.linear(hidden, self.model.model.decoder.embed_tokens.weight)
        text = functional.cross_entropy(
            logits.float().flatten(0, 1), windows.labels.flatten(), ignore_index=IGNORED
        )
        frames = functional.cross_entropy(
            self.frame_head(encoded).float().flatten(0, 1), windows.frame_tokens.flatten()
        )
        attention = torch.stack(
            [attention_loss(head, windows.spans, windows.labels) for head in guided]
        ).mean()
        return Losses(text, attention, frames)


def attention_loss(head: Attention, spans: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a head's attention with an even spread over the ticks in which the label is heard, in nats.

    It is least where the attention is that spread, which is what finding word times by dynamic time warping wants. The
    mean of q . k over a span is q times the mean of k.
    """
    queries, keys = head.queries.float() * head.queries.shape[-1] ** -0.5, head.keys.float()
    first, last = spans.clamp(0, keys.shape[1]).unbind(2)
    counted = (labels != IGNORED) & (last > first)
    sums = functional.pad(keys.cumsum(1), (0, 0, 1, 0))  # of the keys before each tick

    def before(ticks: torch.Tensor) -> torch.Tensor:
        return sums.gather(1, ticks[..., None].expand(-1, -1, sums.shape[2]))

    mean_key = (before(last) - before(first)) / (last - first).clamp(min=1)[..., None]
    losses = (queries @ keys.transpose(1, 2)).logsumexp(2) - (queries * mean_key).sum(2)
    return (losses * counted).sum() / counted.sum().clamp(min=1)


assert FIRST_TIMESTAMP_ID + NUM_TIMESTAMPS == VOCAB_SIZE
