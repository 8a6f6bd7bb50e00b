"""Hub names, from a cache that was filled earlier, with the hub out of reach."""

import shutil

import huggingface_hub.constants
import pytest
from tiny_checkpoints import SMALL_SHARDS, assert_same_weights, load, save_tiny

from model_states.errors import CheckpointError
from model_states.loading import load_checkpoint_config, load_generation_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The snapshot folder of `owner/name` in a cache of our own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


@pytest.mark.parametrize("shard_bytes", [None, SMALL_SHARDS], ids=["one_file", "sharded"])
def test_a_cached_model_loads_without_the_hub(cached, shard_bytes):
    expected = save_tiny(cached, shard_bytes=shard_bytes)
    checkpoint = load_checkpoint_config("owner/name")
    assert checkpoint.model == "owner/name"
    assert load_generation_config(checkpoint).eos_token_ids == (2,)
    assert_same_weights(load("owner/name"), expected)


def test_unindexed_files_of_the_cache(cached):
    expected = save_tiny(cached, shard_bytes=SMALL_SHARDS)
    (cached / "model.safetensors.index.json").unlink()
    assert_same_weights(load("owner/name"), expected)


def test_a_cache_that_lacks_a_shard_names_it(cached):
    save_tiny(cached, shard_bytes=SMALL_SHARDS)
    shard = sorted(cached.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load("owner/name")


def test_a_cache_without_weights_or_config(cached):
    save_tiny(cached)
    (cached / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load("owner/name")
    shutil.rmtree(cached)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        load("owner/name")
