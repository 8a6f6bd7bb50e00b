"""Models with linear layers on a GPU: compiled kernels, recorded steps, tokens equal to full recomputation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from linear.tiny import TINY, save_tiny
from mamba.padded_steps import check_padding_rows_touch_nobody, make_runner
from support.drained import Drained
from support.never_waiting import check_never_waits
from support.recurrent_exact import TinyRecurrent, check_long_prompts, check_on_gpu
from support.recurrent_hits import SIZES, check_tails

pytestmark = pytest.mark.gpu


def _sizes(name: str) -> dict[str, Any]:
    """Head sizes of at least 16 are what the tiles of attention can take."""
    return {"hidden_size": 64, **({"head_dim": 16} if "head_dim" in TINY[name][1] else {})}


def _tiny(name: str, directory: Path, **overrides: Any) -> TinyRecurrent:
    return TinyRecurrent(name, directory, partial(save_tiny, **_sizes(name), **overrides))


@pytest.mark.parametrize("name", TINY)
def test_equals_full_recomputation(name: str, tmp_path: Path, drained: Drained) -> None:
    check_on_gpu(name, tmp_path, save_tiny, _sizes(name), drained)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_prompts_longer_than_a_step(name: str, tmp_path: Path, drained: Drained) -> None:
    model = _tiny(name, tmp_path, max_position_embeddings=4096)
    model.model.to("cuda")
    check_long_prompts(model, drained, "cuda")


@pytest.mark.parametrize("num_rows", [3, 6])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "olmo_hybrid"])
def test_padding_rows_touch_nobody(name: str, num_rows: int, tmp_path: Path) -> None:
    """Field report C-02."""
    model = _tiny(name, tmp_path)
    check_padding_rows_touch_nobody(make_runner(model, device="cuda"), model, num_rows)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_tails_that_look_like_decode_steps(name: str, tmp_path: Path, drained: Drained) -> None:
    """Field report C-03."""
    model = _tiny(name, tmp_path)
    sizes = {**SIZES, "device": "cuda", "dtype": "float32", "max_num_batched_tokens": 16}
    states = {"model_options": {"state_block_size": 16}}
    check_tails(model, drained(model.directory, num_blocks=120, **sizes, **states))


def test_steps_never_synchronise(tmp_path: Path, drained: Drained) -> None:
    check_never_waits(_tiny("qwen3_next", tmp_path), None, drained)
