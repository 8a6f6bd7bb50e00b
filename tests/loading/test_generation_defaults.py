"""generation_config.json and what it falls back to."""

import json

import pytest
from tiny_checkpoints import SIZES

from model_states.errors import CheckpointError
from model_states.loading import GenerationDefaults, load_checkpoint_config, load_generation_config


def defaults(directory, generation=None, **config):
    raw = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **config}
    (directory / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (directory / "generation_config.json").write_text(text)
    return load_generation_config(load_checkpoint_config(str(directory)))


def test_nothing_said(tmp_path):
    assert defaults(tmp_path) == GenerationDefaults()


def test_the_file_wins_over_config(tmp_path):
    found = defaults(tmp_path, {"eos_token_id": [5, 6, 5], "bos_token_id": 4}, eos_token_id=2, bos_token_id=1)
    assert (found.eos_token_ids, found.bos_token_id) == ((5, 6), 4)


def test_ids_fall_back_one_by_one(tmp_path):
    found = defaults(tmp_path, {"eos_token_id": None, "bos_token_id": 0}, eos_token_id=[2, 3], bos_token_id=1)
    assert (found.eos_token_ids, found.bos_token_id) == ((2, 3), 0)


def test_ids_of_a_nested_text_config(tmp_path):
    raw = {"model_type": "unheard", "architectures": ["Unheard"], "text_config": {"eos_token_id": 7}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_generation_config(load_checkpoint_config(str(tmp_path))).eos_token_ids == (7,)


def test_recommended_sampling_counts_only_when_sampling_is_on(tmp_path):
    numbers = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    found = defaults(tmp_path, {"do_sample": True, **numbers})
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert isinstance(found.top_k, int)
    for greedy in ({"do_sample": False, **numbers}, numbers):
        found = defaults(tmp_path, greedy)
        assert (found.temperature, found.top_k, found.top_p) == (None, None, None)


@pytest.mark.parametrize("generation", ["{", "[]", {"eos_token_id": "end"}, {"eos_token_id": [1, True]}])
def test_broken_files_are_refused(tmp_path, generation):
    with pytest.raises(CheckpointError, match=r"generation_config\.json|eos_token_id"):
        defaults(tmp_path, generation)
