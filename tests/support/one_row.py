"""A decoder state over a tiny checkpoint, and steps of one request through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from model_states_decoder.self_check import _one_row_batch
from model_states_decoder.state import DecoderState
from support.tiny_models import save_tiny

from model_states import ModelConfig
from model_states.loading import load_checkpoint_config


def load_state(directory: Path, **options: Any) -> DecoderState:
    """The decoder plugin's state for the checkpoint in `directory`, fp32 on the CPU."""
    settings = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "max_model_len": 128,
        "max_num_reqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        **options,
    }
    return DecoderState(ModelConfig(checkpoint=load_checkpoint_config(str(directory)), **settings))


def tiny_state(name: str, directory: Path, **options: Any) -> DecoderState:
    """The state of one of the tiny models."""
    save_tiny(name, directory)
    return load_state(directory, **options)


def hidden_states(state: DecoderState, steps: tuple[int, ...] = (30, 1, 3), **inputs: Any) -> torch.Tensor:
    """Hidden states [sum(steps), hidden] of one request that runs in these steps; 30 tokens take no path for few."""
    attention = state.components[0]
    groups = attention.cache_groups()
    length = sum(steps)
    ids = torch.arange(length, device=state.config.device) * 7919 % state.vocab_size
    caches = {g.name: g.allocate(length // state.config.block_size + 2, ids.device) for g in groups}
    attention.init_caches(caches)
    outputs, start = [], 0
    for count in steps:
        batch = _one_row_batch(ids[start : start + count], start, len(groups), state.config)
        attention.prepare_attn(batch)
        outputs.append(state.forward(batch, **inputs))
        start += count
    return torch.cat(outputs)
