"""Models with recurrent state on a GPU: compiled kernels, recorded steps, tokens equal to full recomputation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mamba.padded_steps import check_padding_rows_touch_nobody, make_runner
from support.drained import Drained
from support.never_waiting import never_waiting
from support.recurrent_exact import TinyRecurrent, check_on_gpu
from support.recurrent_hits import SIZES, check_tails
from support.tiny_recurrent import TINY, save_tiny
from support.whole_steps import ways_since

from core_runner import SamplingParams

pytestmark = pytest.mark.gpu


def _sizes(name: str) -> dict[str, Any]:
    """Head sizes of at least 16 are what the tiles of attention can take."""
    sizes: dict[str, Any] = {} if name in ("mamba", "falcon_mamba", "mamba2") else {"hidden_size": 64}
    sizes |= {"mamba_d_head": 16} if "mamba_d_head" in TINY[name][1] else {}
    sizes |= {"mamba_d_ssm": 128} if "mamba_d_ssm" in TINY[name][1] else {}
    sizes |= {"head_dim": 16} if "head_dim" in TINY[name][1] and "hidden_size" in sizes else {}
    return sizes


def _tiny(name: str, directory: Path) -> TinyRecurrent:
    return TinyRecurrent(name, directory, partial(save_tiny, **_sizes(name)))


@pytest.mark.parametrize("name", TINY)
def test_equals_full_recomputation(name: str, tmp_path: Path, drained: Drained) -> None:
    check_on_gpu(name, tmp_path, save_tiny, _sizes(name), drained)


@pytest.mark.parametrize("num_rows", [3, 5, 6, 7])
@pytest.mark.parametrize("name", ["bamba", "mamba"])
def test_padding_rows_touch_nobody(name: str, num_rows: int, tmp_path: Path) -> None:
    """Field report C-02."""
    model = _tiny(name, tmp_path)
    check_padding_rows_touch_nobody(make_runner(model, device="cuda"), model, num_rows)


@pytest.mark.parametrize("name", ["bamba", "mamba2", "jamba"])
def test_tails_that_look_like_decode_steps(name: str, tmp_path: Path, drained: Drained) -> None:
    """Field report C-03."""
    model = _tiny(name, tmp_path)
    sizes = {**SIZES, "device": "cuda", "dtype": "float32", "max_num_batched_tokens": 16}
    states = {"model_options": {"state_block_size": 16}}
    check_tails(model, drained(model.directory, num_blocks=120, **sizes, **states))


@pytest.mark.parametrize("logprobs", [None, 1])
def test_steps_never_synchronise(logprobs: int | None, tmp_path: Path, drained: Drained) -> None:
    save_tiny("mamba2", tmp_path)
    options = {"max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 40, "poison": False}
    llm = drained(str(tmp_path), device="cuda", model_options={"state_block_size": 16}, **options)
    prompts = [[5 + n % 7] * n for n in range(1, 64, 3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=logprobs)
    for _ in range(3):  # loading and recording kernels synchronises
        llm.generate(prompts, params)
    before = llm.stats().step_ways
    with never_waiting(llm.engine.runner) as counted:
        outputs = llm.generate(prompts, params)
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
    ways = ways_since(llm, before)
    assert counted.steps == sum(ways.values()) > 60
    assert ways["step graph" if logprobs is None else "forward graph"] > 50, ways
