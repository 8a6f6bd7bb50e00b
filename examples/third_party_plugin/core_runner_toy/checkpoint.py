"""The toy's model directory, and its answers by the formula."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

VOCAB_SIZE = 97
FACTOR = 5
LAG = 3


def write_checkpoint(directory: Path, max_position_embeddings: int = 512) -> Path:
    """Write a model directory; the toy has no weights, so config.json is all of it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["ToyForCausalLM"],
        "model_type": "core-runner-toy",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_position_embeddings,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the toy must generate greedily after a prompt of token ids below `VOCAB_SIZE`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        running = len(prompt)
        for token in tokens:
            running = (FACTOR * running + token) % VOCAB_SIZE
        lagged = tokens[-1 - LAG] if len(tokens) > LAG else 0
        tokens.append((running + lagged) % VOCAB_SIZE)
    return tokens[len(prompt) :]
