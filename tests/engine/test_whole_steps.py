"""EXACT out of whole-step graphs for every architecture, cold and with prefix hits; on a CPU, by `support.replays`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from linear import tiny as linear_models
from support import tiny_models, tiny_recurrent
from support.drained import Drained
from support.reference import greedy_reference
from support.replays import replayed_steps
from support.tiny_recurrent import recomputed_reference
from support.whole_steps import check_whole_steps

MAX_TOKENS = 8
_draw = random.Random(11)
PROMPTS = [[_draw.randrange(3, 211) for _ in range(length)] for length in (1, 3, 17, 33, 40)]
OPTIONS = {
    "device": "cpu",
    "block_size": 4,
    "max_num_reqs": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 23,
    "num_blocks": 60,
}
STATES = {"model_options": {"state_block_size": 16}}
RECURRENT = {
    **{f"mamba {name}": (tiny_recurrent.save_tiny, name) for name in tiny_recurrent.TINY},
    **{f"linear {name}": (linear_models.save_tiny, name) for name in linear_models.TINY},
}
# One of each kind of layer; the pairwise matrices replay llama, gemma2, mamba2, jamba, lfm2 and qwen3_next.
DECODERS_BY_DEFAULT = ("gpt2", "cohere2", "gpt_oss", "deepseek_v3")
RECURRENT_BY_DEFAULT = ("mamba falcon_mamba", "mamba bamba", "mamba falcon_h1", "linear qwen3_5_moe")


def _marked(names, default):
    """The names, those that are not in `default` marked as slow."""
    assert set(default) <= set(names)
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _marked(tiny_models.TINY, DECODERS_BY_DEFAULT))
def test_decoders(name: str, tmp_path: Path, drained: Drained) -> None:
    model = tiny_models.save_tiny(name, tmp_path)
    references = [greedy_reference(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    with replayed_steps():
        llm = drained(str(tmp_path), **OPTIONS)
    check_whole_steps(llm, PROMPTS, references, name)


@pytest.mark.parametrize("name", _marked(RECURRENT, RECURRENT_BY_DEFAULT))
def test_recurrent_models(name: str, tmp_path: Path, drained: Drained) -> None:
    save, tiny_name = RECURRENT[name]
    model = save(tiny_name, tmp_path)
    references = [recomputed_reference(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    with replayed_steps():
        llm = drained(str(tmp_path), **OPTIONS, **STATES)
    check_whole_steps(llm, PROMPTS, references, name)
