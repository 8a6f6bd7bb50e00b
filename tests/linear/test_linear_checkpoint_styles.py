"""Checkpoints in the names of the hub's older files and in transformers' own load to the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from linear.tiny import save_tiny
from support.drained import Drained
from support.older_files import check_loads, make_older, rope, tensor_names

# name -> (options of the model, fields of an older config)
OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_next": (
        # Of the default four dimensions a quarter would be one frequency, which is 1 for every base.
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            **rope(partial_rotary_factor=0.25),
        },
        {"full_attention_interval": 2, "partial_rotary_factor": 0.25},
    ),
    "lfm2": (
        {"tie_word_embeddings": True, **rope()},
        {
            "full_attn_idxs": [2],
            "block_ff_dim": 48,
            "intermediate_size": None,
            "tie_embedding": True,
            "tie_word_embeddings": None,
        },
    ),
    "lfm2_moe": (
        {"tie_word_embeddings": True, **rope()},
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "tie_embedding": True,
            "tie_word_embeddings": None,
        },
    ),
}


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "lfm2_moe", "olmo_hybrid"])
def test_names_of_both_styles(name: str, tmp_path: Path, drained: Drained) -> None:
    """Tensors for each expert or for all together, and for each of three convolutions or for all together."""
    names = []
    for original in (True, False):
        directory = tmp_path / str(original)
        model = save_tiny(name, directory)
        if not original:
            model.save_pretrained(directory, save_original_format=False)
        names.append(tensor_names(directory))
        check_loads(model, directory, drained)
    assert names[0] != names[1]


@pytest.mark.parametrize("name", OLDER)
def test_configs_of_older_files(name: str, tmp_path: Path, drained: Drained) -> None:
    overrides, fields = OLDER[name]
    model = save_tiny(name, tmp_path, **overrides)
    make_older(tmp_path, fields)
    check_loads(model, tmp_path, drained)
