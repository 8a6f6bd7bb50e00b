"""Dtypes of states, layers as transformers has them, states that move, checkpoints that hold more, and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from linear.tiny import save_tiny
from model_states_linear.mixers import MIXERS
from support.drained import Drained
from support.moved_states import check_it_goes_on, check_it_may_be_pushed_out, two_engines
from support.recurrent_exact import TinyRecurrent, check_long_prompts, check_state_dtype
from support.reference import assert_wholly_exact
from support.tiny_recurrent import recomputed_reference

from core_runner import LLM, SamplingParams
from model_states import UnsupportedModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
PROMPT = [(13 * i) % 200 + 3 for i in range(40)]


def _llm(drained: Drained, directory: str, **options) -> LLM:
    sizes = {"block_size": 16, "max_num_reqs": 2, "max_model_len": 96}
    return drained(directory, device="cpu", **{**sizes, **options})


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_states_in_another_dtype_than_the_weights(name: str, tiny, drained: Drained) -> None:
    """As near to transformers in the dtype of the weights as a few roundings leave it."""
    check_state_dtype(tiny(name), drained, torch.bfloat16, ("delta", torch.float32), 0.25)
    check_state_dtype(tiny(name), drained, torch.float32, ("delta", torch.bfloat16), 0.06)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "olmo_hybrid"])
def test_layers_as_they_are_give_the_same(name: str, tiny, drained: Drained) -> None:
    model = tiny(name)
    llm = _llm(drained, model.directory, fused_layers=False)
    assert_wholly_exact(llm.generate(PROMPT, GREEDY)[0].outputs[0], model.reference(PROMPT, 4), name)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_prompts_longer_than_a_step(name: str, tmp_path: Path, drained: Drained) -> None:
    save = partial(save_tiny, max_position_embeddings=4096)
    check_long_prompts(TinyRecurrent(name, tmp_path, save), drained, "cpu")


@pytest.mark.parametrize("name", ["qwen3_5_only_linear", "qwen3_next", "lfm2", "olmo_hybrid"])
def test_a_state_moves_to_another_engine(name: str, tiny, drained: Drained, tmp_path: Path) -> None:
    model = tiny(name)
    here, there = two_engines(drained, model)
    check_it_goes_on(model, here, there, tmp_path)
    check_it_may_be_pushed_out(model, here, there)


def test_the_language_model_of_a_larger_checkpoint(tmp_path: Path, drained: Drained) -> None:
    from linear.tiny import COMMON, DELTA
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config={**COMMON, **DELTA}, vision_config=vision)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval().save_pretrained(tmp_path)
    (output,) = _llm(drained, str(tmp_path)).generate([PROMPT], GREEDY)
    assert_wholly_exact(output.outputs[0], recomputed_reference(model, PROMPT, 4), "text alone")


def test_prompts_of_thousands_of_tokens(tmp_path: Path, drained: Drained) -> None:
    # Prompts that differ in their first tokens only, so that the states and the attention alone know which is which.
    model = save_tiny("qwen3_5", tmp_path, max_position_embeddings=4096)
    llm = _llm(drained, str(tmp_path), max_model_len=2200, max_num_batched_tokens=600)
    prompts = [[first, *((17 * i) % 200 + 3 for i in range(2048))] for first in (5, 6)]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert_wholly_exact(
            output.outputs[0], recomputed_reference(model, prompt, 4), f"{len(prompt)} tokens"
        )


def test_an_unknown_dtype_is_refused_whatever_layers_there_are(tiny) -> None:
    with pytest.raises(UnsupportedModelError, match="state_dtype='int8' is not one of float32"):
        LLM(tiny("lfm2").directory, device="cpu", model_options={"state_dtype": "int8"})


def test_an_unknown_mixer_is_refused(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MIXERS, "Lfm2ShortConv")
    with pytest.raises(
        UnsupportedModelError, match="4 layers, of which 0 have a mixer that this model state knows and 1"
    ):
        LLM(tiny("lfm2").directory, device="cpu")


def test_another_activation_is_refused(tmp_path: Path) -> None:
    save_tiny("qwen3_5", tmp_path, hidden_act="gelu")
    with pytest.raises(UnsupportedModelError, match="activation 'gelu'; silu is supported"):
        LLM(str(tmp_path), device="cpu")
