"""Checkpoints as the hub's older files have them, whose configs name things otherwise than transformers 5 does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from support.drained import Drained
from support.reference import assert_wholly_exact
from support.tiny_recurrent import recomputed_reference

from core_runner import SamplingParams

PROMPT = [(11 * i) % 200 + 3 for i in range(20)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
# A base that nothing takes by default, so that a lost one shows; and fields that have replaced older ones.
ROPE_THETA = 500.0
NEWER = ("dtype", "rope_parameters", "layer_types", "layers_block_type", "hybrid_layer_ids")


def rope(**fields: Any) -> dict[str, Any]:
    """For a model that is built: its rotation by `ROPE_THETA`."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA, **fields}}


def make_older(directory: Path, fields: dict[str, Any]) -> None:
    """Write `fields` into the config, in place of what transformers 5 calls otherwise; None takes a field out."""
    path = directory / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in NEWER}
    config |= {"torch_dtype": "float32", "rope_theta": ROPE_THETA, "rope_scaling": None, **fields}
    taken_out = {key for key, value in fields.items() if value is None}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in taken_out}))


def check_loads(model: Any, directory: Path, drained: Drained) -> None:
    """What the checkpoint holds is this model."""
    options = {"block_size": 16, "max_num_reqs": 2, "max_model_len": 64, "num_blocks": 20}
    llm = drained(str(directory), device="cpu", **options)
    (output,) = llm.generate([PROMPT], GREEDY)
    assert_wholly_exact(output.outputs[0], recomputed_reference(model, PROMPT, 4))


def tensor_names(directory: Path) -> set[str]:
    """Of a checkpoint of one file."""
    return set(load_file(directory / "model.safetensors"))
