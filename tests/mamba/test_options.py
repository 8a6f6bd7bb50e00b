"""Options of recurrent state, their refusals, and prompts of thousands of tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from mamba.states import component_of, pools
from support.drained import Drained
from support.recurrent_exact import TinyRecurrent, check_long_prompts, check_state_dtype
from support.reference import assert_wholly_exact
from support.tiny_recurrent import recomputed_reference, save_tiny

from core_runner import LLM, ConfigError, SamplingParams
from model_states import UnsupportedModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
PROMPT = [(13 * i) % 200 + 3 for i in range(40)]


def _llm(drained: Drained, model, **options) -> LLM:
    sizes = {"block_size": 16, "max_num_reqs": 2, "max_model_len": 96}
    return drained(model.directory, device="cpu", **{**sizes, **options})


@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_states_in_another_dtype_than_the_weights(name: str, tiny, drained: Drained) -> None:
    """Weights in bfloat16 with states in float32, and the other way round."""
    check_state_dtype(tiny(name), drained, torch.bfloat16, ("ssm", torch.float32), 0.1)
    check_state_dtype(tiny(name), drained, torch.float32, ("ssm", torch.bfloat16), 5e-3)


def test_state_blocks_follow_the_attention_blocks(tiny, drained: Drained) -> None:
    llm = _llm(drained, tiny("bamba"), block_size=32)
    assert component_of(llm.engine.runner).block_size == 256
    llm = _llm(drained, tiny("bamba"), model_options={"state_block_size": 128})
    assert component_of(llm.engine.runner).block_size == 128
    # Two requests, whose states are few however long they are.
    assert len(pools(llm.engine.runner)[0]) < 2 * 3 + 2048 // 128 + 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"state_dtype": "int8"}, UnsupportedModelError, "state_dtype='int8' is not one of float32"),
        ({"state_block_size": 48}, UnsupportedModelError, "power of two up to 64, or a multiple of 64"),
        ({"state_block_size": "64"}, UnsupportedModelError, "state_block_size='64' must be"),
        ({"state_block_size": 64 * 10**9}, UnsupportedModelError, "or a multiple of 64 up to 16777216"),
        ({"block": 3}, ConfigError, "no option of model state 'mamba'; it has state_dtype, state_block_size"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, error: type, message: str, tiny) -> None:
    with pytest.raises(error, match=message):
        LLM(tiny("mamba2").directory, device="cpu", model_options=options)


def test_a_decoder_has_no_such_option() -> None:
    with pytest.raises(ConfigError, match="it has none"):
        LLM(device="cpu", model_options={"state_dtype": "float32"})


def test_prompts_of_thousands_of_tokens(tmp_path: Path, drained: Drained) -> None:
    # Prompts that differ in their first token only, so that the state alone knows which is which.
    model = save_tiny("bamba", tmp_path, max_position_embeddings=4096)
    llm = drained(
        str(tmp_path),
        device="cpu",
        block_size=16,
        max_num_reqs=2,
        max_model_len=2200,
        max_num_batched_tokens=600,
    )
    prompts = [[first, *((17 * i) % 200 + 3 for i in range(2048))] for first in (5, 6)]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert_wholly_exact(
            output.outputs[0], recomputed_reference(model, prompt, 4), f"{len(prompt)} tokens"
        )


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_prompts_longer_than_a_step(name: str, tmp_path: Path, drained: Drained) -> None:
    save = partial(save_tiny, max_position_embeddings=4096)
    check_long_prompts(TinyRecurrent(name, tmp_path, save), drained, "cpu")


def test_an_attention_backend_that_nothing_uses_is_told(
    tiny, drained: Drained, caplog: pytest.LogCaptureFixture
) -> None:
    for name, is_told in (("mamba2", True), ("bamba", False)):
        caplog.clear()
        _llm(drained, tiny(name), attention_backend="torch")
        told = [r.getMessage() for r in caplog.records if "attention_backend='torch'" in r.getMessage()]
        assert bool(told) == is_told
