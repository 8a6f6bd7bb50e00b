"""Tiny checkpoints of random weights, and ways to damage them."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from model_states.config import ModelConfig
from model_states.loading import load_checkpoint_config, load_transformers_model

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SMALL_SHARDS = 12_000
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def save_tiny(directory, *, tied=False, shard_bytes=None, model=None):
    """Save a tiny decoder (or `model`) and return it; sharded with an index where `shard_bytes` is given."""
    if model is None:
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(directory, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    return model.eval()


def model_config(directory, **options):
    """A `ModelConfig` of a directory on the CPU in float32."""
    checkpoint = load_checkpoint_config(str(directory))
    sizes = {"max_model_len": 64, "max_num_reqs": 4, "max_num_batched_tokens": 64, "block_size": 16}
    defaults = {"device": torch.device("cpu"), "dtype": torch.float32}
    return ModelConfig(checkpoint=checkpoint, **{**sizes, **defaults, **options})


def load(directory, attention="sdpa", **options):
    """Load a directory as a plugin would."""
    return load_transformers_model(model_config(directory, **options), attn_implementation=attention)


def edit_config(directory, drop=(), **changes):
    """Change keys of config.json."""
    path = directory / "config.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps({**content, **changes}))


def edit_tensors(path, change):
    """Pass the dict of one safetensors file through `change` and write it back."""
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def assert_same_weights(model, expected, dtype=torch.float32):
    """Every parameter and buffer is the expected one, bit for bit after one conversion."""
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], tensor.to(dtype)), name
