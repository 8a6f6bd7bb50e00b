"""config.json: what is read, derived, normalised and refused."""

import json

import pytest
import torch
from tiny_checkpoints import SIZES, edit_config, save_tiny

from model_states.errors import CheckpointError
from model_states.loading import load_checkpoint_config

OLD = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}


def write(directory, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "config.json").write_text(text)
    return str(directory)


def test_a_saved_checkpoint(tmp_path):
    save_tiny(tmp_path)
    checkpoint = load_checkpoint_config(str(tmp_path))
    assert checkpoint.model == str(tmp_path)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.raw_config["hidden_size"] == checkpoint.hf_config.hidden_size == SIZES["hidden_size"]
    assert checkpoint.hf_config.dtype == torch.float32


def test_an_unknown_model_type_is_left_to_the_plugins(tmp_path):
    raw = {"model_type": "never_heard_of", "architectures": ["NeverHeardOf"], "width": 3}
    checkpoint = load_checkpoint_config(write(tmp_path, raw))
    assert checkpoint.hf_config is None
    assert checkpoint.architecture == "NeverHeardOf"
    assert checkpoint.raw_config == raw


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/no-such-model", "no such directory, the hub cannot be reached"),
        ("/no/such/directory", "no such directory, and not a hub name"),
        ("not a name", "no such directory, and not a hub name"),
    ],
)
def test_a_model_that_is_nowhere(name, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint_config(name)
    assert name in str(caught.value)


def test_a_file_instead_of_a_directory(tmp_path):
    save_tiny(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        load_checkpoint_config(str(tmp_path / "model.safetensors"))


def test_no_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_checkpoint_config(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "", "[1]", "\x00"])
def test_a_config_that_is_no_json_object(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint_config(write(tmp_path, content))


def test_a_missing_architecture_is_derived_or_refused(tmp_path):
    raw = {key: value for key, value in OLD.items() if key != "architectures"}
    assert load_checkpoint_config(write(tmp_path, raw)).architecture == "LlamaForCausalLM"
    with pytest.raises(CheckpointError, match="architectures"):
        load_checkpoint_config(write(tmp_path, {"model_type": "never_heard_of"}))
    with pytest.raises(CheckpointError, match="architectures"):
        load_checkpoint_config(write(tmp_path, {"architectures": []}))


def test_remote_code_is_run_only_when_asked_for(tmp_path):
    code = (
        "from transformers import PreTrainedConfig\nclass C(PreTrainedConfig):\n    model_type = 'far_away'\n"
    )
    (tmp_path / "far.py").write_text(code)
    raw = {"model_type": "far_away", "architectures": ["Far"], "auto_map": {"AutoConfig": "far.C"}}
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        load_checkpoint_config(write(tmp_path, raw))
    trusted = load_checkpoint_config(str(tmp_path), trust_remote_code=True)
    assert type(trusted.hf_config).__name__ == "C"
    assert trusted.trust_remote_code


def test_remote_code_beside_a_known_type_is_not_needed(tmp_path):
    checkpoint = load_checkpoint_config(write(tmp_path, {**OLD, "auto_map": {"AutoConfig": "far.C"}}))
    assert type(checkpoint.hf_config).__name__ == "LlamaConfig"


def test_values_that_transformers_refuses(tmp_path):
    with pytest.raises(CheckpointError, match="hidden_size"):
        load_checkpoint_config(write(tmp_path, {**OLD, "hidden_size": "wide"}))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            },
            {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
    ],
)
def test_both_styles_mean_the_same(tmp_path, old, new):
    older = load_checkpoint_config(write(tmp_path, {**OLD, **old, "torch_dtype": "bfloat16"})).hf_config
    newer = load_checkpoint_config(
        write(tmp_path, {**OLD, "rope_parameters": new, "dtype": "bfloat16"})
    ).hf_config
    assert older.dtype == newer.dtype == torch.bfloat16
    kept = {key: older.rope_parameters[key] for key in new}
    assert kept == new == {key: newer.rope_parameters[key] for key in new}


def test_two_rope_bases_of_the_older_style(tmp_path):
    raw = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    parameters = load_checkpoint_config(write(tmp_path, raw)).hf_config.rope_parameters
    assert parameters["full_attention"]["rope_theta"] == 1e6
    assert parameters["full_attention"]["factor"] == 8.0
    assert parameters["sliding_attention"]["rope_theta"] == 5e3


def test_older_names_of_the_base(tmp_path):
    raw = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "rotary_emb_base": 5000}
    checkpoint = load_checkpoint_config(write(tmp_path, {**raw, "rotary_pct": 0.5}))
    assert checkpoint.hf_config.rope_parameters["rope_theta"] == 5000
    assert checkpoint.hf_config.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "spiral", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
    ],
)
def test_an_unknown_rope_type_is_refused(tmp_path, changes):
    with pytest.raises(CheckpointError, match="unknown rope type 'spiral'"):
        load_checkpoint_config(write(tmp_path, {**OLD, **changes}))


def test_an_unknown_rope_type_of_one_layer_type_is_refused(tmp_path):
    rope = {"full_attention": {"rope_type": "spiral", "rope_theta": 1e4}, "sliding_attention": None}
    raw = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "rope_parameters": rope}
    with pytest.raises(CheckpointError, match=r"spiral.*full_attention"):
        load_checkpoint_config(write(tmp_path, raw))


def test_settings_that_transformers_passes_by_are_refused(tmp_path):
    # This class keeps its base in `rotary_emb_base`; `rope_theta` alone would be lost.
    raw = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "rope_theta": 777.0}
    with pytest.raises(CheckpointError, match=r"rope_theta=777\.0"):
        load_checkpoint_config(write(tmp_path, raw))


def test_a_broken_rope_dict_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="factor"):
        load_checkpoint_config(write(tmp_path, {**OLD, "rope_scaling": {"rope_type": "linear"}}))


def test_a_local_copy_is_not_changed(tmp_path):
    save_tiny(tmp_path)
    edit_config(tmp_path, drop=("dtype", "rope_parameters"), torch_dtype="float16", rope_theta=1e4)
    before = (tmp_path / "config.json").read_bytes()
    load_checkpoint_config(str(tmp_path))
    assert (tmp_path / "config.json").read_bytes() == before
