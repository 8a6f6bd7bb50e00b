"""Checkpoints in the names of the hub's older files and in transformers' own load to the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.drained import Drained
from support.older_files import check_loads, make_older, rope, tensor_names
from support.tiny_recurrent import build_tiny

# name -> (options of the model, fields of an older config)
OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bamba": (
        rope(partial_rotary_factor=0.5),
        {"attn_layer_indices": [1, 3], "attn_rotary_emb": 4, "mamba_d_head": "auto"},
    ),
    "granitemoehybrid": ({}, {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "nope"}),
    "granitemoehybrid_dense": (rope(), {"layer_types": ["mamba", "attention"] * 2, "mamba_d_head": "auto"}),
    "zamba2": (
        rope(),
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
            "num_logits_to_keep": 1,
        },
    ),
    "falcon_h1": (rope(), {"attn_layer_indices": None, "mamba_use_mlp": True, "num_logits_to_keep": 1}),
    "nemotron_h": (
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
        {"hybrid_override_pattern": "M-*-", "num_hidden_layers": 4, "num_logits_to_keep": 1},
    ),
}


@pytest.mark.parametrize("name", ["jamba", "nemotron_h", "granitemoehybrid", "mamba2"])
def test_names_of_both_styles(name: str, tmp_path: Path, drained: Drained) -> None:
    model = build_tiny(name)
    names = []
    for original in (True, False):
        directory = tmp_path / str(original)
        model.save_pretrained(directory, save_original_format=original)
        names.append(tensor_names(directory))
        check_loads(model, directory, drained)
    assert (names[0] != names[1]) == (name in ("jamba", "nemotron_h", "granitemoehybrid"))


@pytest.mark.parametrize("name", OLDER)
def test_configs_of_older_files(name: str, tmp_path: Path, drained: Drained) -> None:
    overrides, fields = OLDER[name]
    model = build_tiny(name, **overrides)
    model.save_pretrained(tmp_path)
    make_older(tmp_path, fields)
    check_loads(model, tmp_path, drained)


def test_patterns_with_experts(tmp_path: Path, drained: Drained) -> None:
    """Layers as a pattern of letters, as the hub's files of Nemotron-H have them."""
    model = build_tiny("nemotron_h")
    model.save_pretrained(tmp_path)
    make_older(tmp_path, {"hybrid_override_pattern": "ME*M"})
    check_loads(model, tmp_path, drained)
