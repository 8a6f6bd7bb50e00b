"""Field report H-01: the output head is the right one, or loading fails and names it."""

import logging

import pytest
import torch
from tiny_checkpoints import (
    EMBEDDING,
    HEAD,
    SIZES,
    SMALL_SHARDS,
    assert_same_weights,
    edit_config,
    edit_tensors,
    load,
    save_tiny,
)
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    LlamaForCausalLM,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)

from model_states.errors import CheckpointError

LAYOUTS = pytest.mark.parametrize("shard_bytes", [None, SMALL_SHARDS], ids=["one_file", "sharded"])


def rewrite(directory, change):
    """Change the tensors of a checkpoint and write it as one file."""
    model = save_tiny(directory)
    edit_tensors(directory / "model.safetensors", change)
    return model


@LAYOUTS
def test_tied_without_a_head_uses_the_embedding(tmp_path, shard_bytes):
    expected = save_tiny(tmp_path, tied=True, shard_bytes=shard_bytes)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_weights(model, expected)


@LAYOUTS
def test_untied_with_a_head_uses_the_head(tmp_path, shard_bytes):
    expected = save_tiny(tmp_path, shard_bytes=shard_bytes)
    model = load(tmp_path)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert_same_weights(model, expected)


def test_tied_with_an_equal_head_uses_the_embedding(tmp_path, caplog):
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    edit_config(tmp_path, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not caplog.records


def test_tied_with_a_different_head_uses_that_head_as_transformers_does_and_warns(tmp_path, caplog):
    expected = save_tiny(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "model_states"):
        model = load(tmp_path)
    assert_same_weights(model, expected)
    assert_same_weights(LlamaForCausalLM.from_pretrained(tmp_path), expected)
    (record,) = [r for r in caplog.records if r.name.startswith("model_states")]
    assert HEAD in record.getMessage()


def test_untied_without_a_head_fails_and_names_it(tmp_path):
    rewrite(tmp_path, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(CheckpointError, match=r"lack 1 tensors.*lm_head\.weight"):
        load(tmp_path)


def test_untied_without_a_head_in_shards_fails_and_names_it(tmp_path):
    save_tiny(tmp_path, tied=True, shard_bytes=SMALL_SHARDS)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(tmp_path)


def test_tied_without_head_or_embedding_fails(tmp_path):
    rewrite(tmp_path, lambda tensors: (tensors.pop(HEAD), tensors.pop(EMBEDDING)))
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        load(tmp_path)


# A class and the answer that it gives where config.json does not say.
COMPOSITES = {
    False: (VipLlavaConfig, VipLlavaForConditionalGeneration),
    True: (AyaVisionConfig, AyaVisionForConditionalGeneration),
}


def save_composite(directory, *, tied, nested_flag):
    """A text and a vision part; the flag stands in the text part alone, against the class's own default."""
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "projection_dim": 16,
    }
    config_class, model_class = COMPOSITES[not nested_flag]
    text = {"model_type": "llama", **SIZES}
    torch.manual_seed(2)
    config = config_class(vision_config=vision, text_config=text, tie_word_embeddings=tied)
    expected = save_tiny(directory, model=model_class(config))
    nested = {**expected.config.to_dict()["text_config"], "tie_word_embeddings": nested_flag}
    edit_config(directory, drop=("tie_word_embeddings",), text_config=nested)
    return expected


@pytest.mark.parametrize("tied", [True, False])
def test_a_flag_in_the_nested_text_config_alone_is_honoured(tmp_path, tied):
    expected = save_composite(tmp_path, tied=tied, nested_flag=tied)
    model = load(tmp_path)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    assert_same_weights(model, expected)


def test_a_nested_flag_that_says_untied_fails_without_a_head(tmp_path):
    save_composite(tmp_path, tied=True, nested_flag=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(tmp_path)
