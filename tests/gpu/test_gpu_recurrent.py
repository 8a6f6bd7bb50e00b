"""Models with recurrent state on a GPU: compiled kernels, recorded steps, tokens equal to full recomputation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.drained import Drained
from support.recurrent_exact import check_on_gpu
from support.tiny_recurrent import TINY, save_tiny

from core_runner import SamplingParams

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("name", TINY)
def test_equals_full_recomputation(name: str, tmp_path: Path, drained: Drained) -> None:
    # Head sizes of at least 16 are what the tiles of attention can take.
    sizes = {} if name in ("mamba", "falcon_mamba", "mamba2") else {"hidden_size": 64}
    sizes |= {"mamba_d_head": 16} if "mamba_d_head" in TINY[name][1] else {}
    sizes |= {"mamba_d_ssm": 128} if "mamba_d_ssm" in TINY[name][1] else {}
    sizes |= {"head_dim": 16} if "head_dim" in TINY[name][1] and "hidden_size" in sizes else {}
    check_on_gpu(name, tmp_path, save_tiny, sizes, drained)


def test_steps_never_synchronise(tmp_path: Path, drained: Drained) -> None:
    save_tiny("mamba2", tmp_path)
    options = {"max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 40, "poison": False}
    llm = drained(str(tmp_path), device="cuda", model_options={"state_block_size": 16}, **options)
    runner = llm.engine.runner
    execute, sample = runner.execute_model, runner.sample_tokens

    def strict(function):
        def call(*args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    runner.execute_model, runner.sample_tokens = strict(execute), strict(sample)
    llm.generate([[5] * n for n in (1, 30, 60, 7)], GREEDY)
