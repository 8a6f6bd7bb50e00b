"""Checkpoints in the names of the hub's older files and in transformers' own load to the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.drained import Drained
from support.reference import assert_wholly_exact
from support.tiny_recurrent import build_tiny, recomputed_reference

from core_runner import SamplingParams

PROMPT = [(11 * i) % 200 + 3 for i in range(20)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)


def _check(model, directory: Path, drained: Drained) -> None:
    options = {"block_size": 16, "max_num_reqs": 2, "max_model_len": 64, "num_blocks": 20}
    llm = drained(str(directory), device="cpu", **options)
    (output,) = llm.generate([PROMPT], GREEDY)
    assert_wholly_exact(output.outputs[0], recomputed_reference(model, PROMPT, 4))


@pytest.mark.parametrize("name", ["jamba", "nemotron_h", "granitemoehybrid", "mamba2"])
def test_names_of_both_styles(name: str, tmp_path: Path, drained: Drained) -> None:
    model = build_tiny(name)
    names = []
    for original in (True, False):
        directory = tmp_path / str(original)
        model.save_pretrained(directory, save_original_format=original)
        names.append(load_file(directory / "model.safetensors").keys())
        _check(model, directory, drained)
    assert (names[0] != names[1]) == (name in ("jamba", "nemotron_h", "granitemoehybrid"))


def test_config_of_older_files(tmp_path: Path, drained: Drained) -> None:
    """Layers as a pattern of letters, as the hub's files of Nemotron-H have them."""
    model = build_tiny("nemotron_h")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field in ("layers_block_type", "layer_types"):
        config.pop(field, None)
    config["hybrid_override_pattern"] = "ME*M"
    (tmp_path / "config.json").write_text(json.dumps(config))
    _check(model, tmp_path, drained)
