"""Experts as one tensor each and as fused tensors load to the same values."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SIZES, SMALL_SHARDS, assert_same_weights, load, save_tiny
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from model_states.errors import CheckpointError

EXPERTS = 4
# How the two families name one expert's gate, up and down projections in files of the older style.
NAMES = {
    "mixtral": ("model.layers.{}.block_sparse_moe", ("w1", "w3", "w2")),
    "qwen2_moe": ("model.layers.{}.mlp", ("gate_proj", "up_proj", "down_proj")),
}


def build(kind):
    torch.manual_seed(3)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS))
    sizes = {"num_experts": EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **sizes, num_experts_per_tok=2))


def per_expert(model, kind):
    """The state dict with every fused tensor cut into the files' older names."""
    block, (gate, up, down) = NAMES[kind]
    tensors = {}
    for name, value in model.state_dict().items():
        if ".mlp." not in name or not name.startswith("model.layers."):
            tensors[name] = value
            continue
        layer, rest = name.split(".")[2], name.split(".mlp.")[1]
        prefix = block.format(layer)
        if rest == "experts.gate_up_proj":
            for expert, both in enumerate(value):
                first, second = both.chunk(2)
                tensors[f"{prefix}.experts.{expert}.{gate}.weight"] = first.contiguous()
                tensors[f"{prefix}.experts.{expert}.{up}.weight"] = second.contiguous()
        elif rest == "experts.down_proj":
            for expert, one in enumerate(value):
                tensors[f"{prefix}.experts.{expert}.{down}.weight"] = one.contiguous()
        else:
            tensors[f"{prefix}.{rest}"] = value
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NAMES)
def test_both_styles_load_to_the_same_values(tmp_path, kind, dtype):
    model = save_tiny(tmp_path, model=build(kind))
    split = per_expert(model, kind)
    fused = dict(model.state_dict())
    assert split.keys() != fused.keys()
    for tensors in (split, fused):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()
        assert_same_weights(load(tmp_path, dtype=dtype), model, dtype)


@pytest.mark.parametrize("kind", NAMES)
def test_split_experts_in_shards(tmp_path, kind):
    model = save_tiny(tmp_path, model=build(kind), shard_bytes=SMALL_SHARDS)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_same_weights(load(tmp_path), model)


@pytest.mark.parametrize("kind", NAMES)
def test_a_missing_expert_fails(tmp_path, kind):
    model = save_tiny(tmp_path, model=build(kind))
    tensors = per_expert(model, kind)
    gone = next(name for name in tensors if ".experts.2." in name)
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts"):
        load(tmp_path)
