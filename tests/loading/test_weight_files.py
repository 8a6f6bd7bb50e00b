"""Weight files that are missing, incomplete, broken, unindexed or of the wrong kind; and what fills the model."""

import json
import logging

import pytest
import torch
from tiny_checkpoints import (
    EMBEDDING,
    SMALL_SHARDS,
    assert_same_weights,
    edit_config,
    edit_tensors,
    load,
    model_config,
    save_tiny,
)

from model_states.errors import CheckpointError, UnsupportedModelError
from model_states.loading import load_transformers_model

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def edit_index(directory, change):
    path = directory / INDEX
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def shard_of(directory, tensor):
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][tensor]


def test_a_missing_shard_is_named_with_a_tensor(tmp_path):
    save_tiny(tmp_path, shard_bytes=SMALL_SHARDS)
    shard = shard_of(tmp_path, EMBEDDING)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing.*\.weight"):
        load(tmp_path)


def test_a_shard_that_lacks_a_promised_tensor_is_named(tmp_path):
    save_tiny(tmp_path, shard_bytes=SMALL_SHARDS)
    shard = shard_of(tmp_path, NORM)
    edit_tensors(shard, lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError, match=rf"{shard.name} lacks 1 tensors.*{NORM}"):
        load(tmp_path)


@pytest.mark.parametrize("shard_bytes", [None, SMALL_SHARDS])
@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b"", lambda b: b"\xff" * 64]
)
def test_a_damaged_file_is_named(tmp_path, shard_bytes, damage):
    save_tiny(tmp_path, shard_bytes=shard_bytes)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"{path.name} is truncated or no safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("weight_map"),
        lambda index: index.update(weight_map={}),
        lambda index: index["weight_map"].update({NORM: "../elsewhere.safetensors"}),
        lambda index: index["weight_map"].update({NORM: "pytorch_model.bin"}),
    ],
)
def test_an_index_that_cannot_be_followed(tmp_path, change):
    save_tiny(tmp_path, shard_bytes=SMALL_SHARDS)
    edit_index(tmp_path, change)
    with pytest.raises(CheckpointError, match="index"):
        load(tmp_path)


def test_an_index_that_is_no_json(tmp_path):
    save_tiny(tmp_path, shard_bytes=SMALL_SHARDS)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load(tmp_path)


def test_several_files_without_an_index_are_read_together(tmp_path):
    expected = save_tiny(tmp_path, shard_bytes=SMALL_SHARDS)
    (tmp_path / INDEX).unlink()
    assert_same_weights(load(tmp_path), expected)


def test_files_without_an_index_that_are_not_all_there(tmp_path):
    save_tiny(tmp_path, shard_bytes=SMALL_SHARDS)
    (tmp_path / INDEX).unlink()
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match="number 2 is missing"):
        load(tmp_path)


def test_files_without_an_index_that_hold_one_tensor_twice(tmp_path):
    save_tiny(tmp_path)
    whole = tmp_path / "model.safetensors"
    (tmp_path / "copy.safetensors").write_bytes(whole.read_bytes())
    whole.rename(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"both copy\.safetensors and weights\.safetensors"):
        load(tmp_path)


def test_pickles_are_refused_and_never_opened(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"would not unpickle")
    with pytest.raises(
        CheckpointError, match=r"pickled weights only \(pytorch_model\.bin\).*save_pretrained"
    ):
        load(tmp_path)


def test_no_weights_at_all(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(tmp_path)


def test_a_missing_parameter_is_named(tmp_path):
    save_tiny(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"lack 1 tensors.*{name}"):
        load(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    save_tiny(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update({NORM: torch.ones(31)}))
    with pytest.raises(CheckpointError, match=rf"{NORM}: \(31,\) in the files, \(32,\) in the model"):
        load(tmp_path)


def test_unused_tensors_are_listed_in_one_warning(tmp_path, caplog):
    expected = save_tiny(tmp_path)
    extra = {"model.layers.7.extra": torch.ones(2), "other.weight": torch.ones(3)}
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in extra)
    assert_same_weights(model, expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_once(tmp_path, stored, wanted):
    expected = save_tiny(tmp_path)
    edit_tensors(
        tmp_path / "model.safetensors",
        lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}),
    )
    model = load(tmp_path, dtype=wanted)
    assert model.dtype == wanted
    assert_same_weights(model, expected.to(stored), wanted)
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())


def test_the_module_is_ready_to_run(tmp_path):
    save_tiny(tmp_path)
    model = load(tmp_path)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_progress_counts_to_the_end(tmp_path, capfd):
    save_tiny(tmp_path, shard_bytes=SMALL_SHARDS)
    capfd.readouterr()
    calls = []
    load(tmp_path, progress=lambda *call: calls.append(call))
    whats, done, totals = zip(*calls, strict=True)
    assert set(totals) == {totals[0]}
    assert list(done) == list(range(totals[0] + 1))
    assert set(whats) == {"Loading weights"}
    assert capfd.readouterr().err == ""


def test_the_bar_of_transformers_is_back_after_an_error(tmp_path):
    from transformers.utils import logging as hf_logging

    save_tiny(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError):
        load(tmp_path)
    assert hf_logging.set_tqdm_hook(None) is None


def test_the_config_of_the_checkpoint_is_not_changed(tmp_path):
    save_tiny(tmp_path)
    config = model_config(tmp_path, dtype=torch.bfloat16)
    for load_format in ("auto", "dummy"):
        load(tmp_path, dtype=torch.bfloat16, load_format=load_format)
    load_transformers_model(config, attn_implementation="eager")
    assert config.checkpoint.hf_config.dtype == torch.float32


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_an_attention_that_the_class_does_not_take_is_refused(tmp_path, load_format):
    save_tiny(tmp_path)
    with pytest.raises(CheckpointError, match="no_such_attention"):
        load(tmp_path, "no_such_attention", load_format=load_format)


def test_a_model_type_without_a_class_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard", "architectures": ["Unheard"]}))
    with pytest.raises(UnsupportedModelError, match="Unheard"):
        load(tmp_path)


def test_the_class_that_architectures_names_wins(tmp_path):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 60}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(**sizes, **ids, max_source_positions=8, max_target_positions=8, num_mel_bins=4)
    torch.manual_seed(0)
    expected = save_tiny(tmp_path, model=WhisperForConditionalGeneration(config))
    model = load(tmp_path)
    assert type(model) is WhisperForConditionalGeneration
    assert_same_weights(model, expected)


def test_a_headless_checkpoint_is_not_given_a_random_head(tmp_path):
    save_tiny(tmp_path)
    edit_config(tmp_path, architectures=["LlamaModel"])

    def keep_base(tensors):
        for name in list(tensors):
            value = tensors.pop(name)
            if name.startswith("model."):
                tensors[name.removeprefix("model.")] = value

    edit_tensors(tmp_path / "model.safetensors", keep_base)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(tmp_path)
