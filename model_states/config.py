"""`ModelConfig`: what a model state is told when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The configuration files of one checkpoint, before a model state is chosen.

    model: hub name or directory. raw_config: config.json as it stands. hf_config: transformers' object for it, or
    None where transformers does not know the model type. architecture: transformers' class name, as in
    config.json's `architectures`.
    """

    model: str
    architecture: str
    raw_config: Mapping[str, Any]
    hf_config: Any | None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model to load, and the sizes that its state has to serve (letters as in the design's glossary)."""

    checkpoint: CheckpointConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int  # L
    max_num_reqs: int  # R
    max_num_batched_tokens: int  # T
    block_size: int
    num_draft_tokens: int = 0  # K
    attention_backend: str | None = None
    fused_layers: bool = True  # rewrite what is recognised of a model; False keeps its own modules
    cuda_graphs: bool = True  # launches beside the steps may be recorded too
    load_format: Literal["auto", "dummy"] = "auto"
    progress: Callable[[str, int, int], None] | None = None  # (what, done, total)
    options: Mapping[str, Any] = field(default_factory=dict)  # out of `ModelState.options`
