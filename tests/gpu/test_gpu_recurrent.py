"""Models with recurrent state on a GPU: compiled kernels, recorded steps, tokens equal to full recomputation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mamba.padded_steps import check_padding_rows_touch_nobody, make_runner
from mamba.recall import DISTANT, MODEL, answers
from support.drained import Drained
from support.moved_states import (
    GREEDY,
    MORE,
    PROMPT,
    check_it_goes_on,
    check_it_may_be_pushed_out,
    kept,
    two_engines,
)
from support.never_waiting import check_never_waits, never_waiting
from support.recurrent_exact import TinyRecurrent, check_long_prompts, check_on_gpu
from support.recurrent_hits import SIZES, check_tails
from support.tiny_recurrent import TINY, save_tiny

pytestmark = pytest.mark.gpu


def _sizes(name: str) -> dict[str, Any]:
    """Head sizes of at least 16 are what the tiles of attention can take."""
    sizes: dict[str, Any] = {} if name in ("mamba", "falcon_mamba", "mamba2") else {"hidden_size": 64}
    sizes |= {"mamba_d_head": 16} if "mamba_d_head" in TINY[name][1] else {}
    sizes |= {"mamba_d_ssm": 128} if "mamba_d_ssm" in TINY[name][1] else {}
    sizes |= {"head_dim": 16} if "head_dim" in TINY[name][1] and "hidden_size" in sizes else {}
    return sizes


def _tiny(name: str, directory: Path, **overrides: Any) -> TinyRecurrent:
    return TinyRecurrent(name, directory, partial(save_tiny, **_sizes(name), **overrides))


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


@pytest.mark.parametrize("name", ["mamba2", "bamba", "jamba"])
def test_prompts_longer_than_a_step(name: str, tmp_path: Path, drained: Drained) -> None:
    model = _tiny(name, tmp_path, max_position_embeddings=4096)
    model.model.to("cuda")
    check_long_prompts(model, drained, "cuda")


@pytest.mark.parametrize(("budget", "state_block_size"), [(2048, 256), (100, 64)])
def test_recall_over_every_distance(budget: int, state_block_size: int, drained: Drained) -> None:
    """The embedded hybrid says over 64 to 1,500 tokens what transformers makes of each example on a CPU."""
    llm = drained(
        MODEL,
        device="cuda",
        dtype="float32",
        max_num_reqs=4,
        max_model_len=2048,
        max_num_batched_tokens=budget,
        model_options={"state_block_size": state_block_size},
    )
    said = [output.outputs[0].text.strip() for output in answers(llm, DISTANT)]
    different = [(e["distance"], s) for e, s in zip(DISTANT, said, strict=True) if s != e["reference"]]
    # A tie may break the other way with another machine's sums.
    assert len(different) <= 1, f"{different}"


@pytest.mark.parametrize(("name", "logprobs"), [("mamba2", None), ("mamba2", 1), ("bamba", None)])
def test_steps_never_synchronise(name: str, logprobs: int | None, tmp_path: Path, drained: Drained) -> None:
    check_never_waits(_tiny(name, tmp_path), logprobs, drained)


def test_a_conversation_goes_on_elsewhere(tmp_path: Path, drained: Drained) -> None:
    """Both that of the recurrent layers and that of attention, to an engine of other block sizes."""
    model = _tiny("bamba", tmp_path)
    model.model.to("cuda")
    here, there = two_engines(drained, model, device="cuda", dtype="float32")
    check_it_goes_on(model, here, there, tmp_path)
    check_it_may_be_pushed_out(model, here, there)


def test_steps_that_states_leave_or_come_in_never_synchronise(tmp_path: Path, drained: Drained) -> None:
    here, there = two_engines(drained, _tiny("bamba", tmp_path), device="cuda", poison=False)
    for _ in range(3):  # loading and recording kernels synchronises
        there.generate([kept(here, PROMPT).prompt(MORE)], GREEDY)
    with never_waiting(here.engine.runner) as leaving, never_waiting(there.engine.runner) as coming:
        (output,) = there.generate([kept(here, PROMPT).prompt(MORE)], GREEDY)
    assert output.num_cached_tokens == len(PROMPT) + 4
    assert leaving.steps >= 5
    assert coming.steps >= 5
