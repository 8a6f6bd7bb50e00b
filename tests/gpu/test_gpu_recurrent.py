"""Models with recurrent state on a GPU: compiled kernels, recorded steps, tokens equal to full recomputation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.drained import Drained
from support.reference import assert_exact
from support.tiny_recurrent import TINY, recomputed_reference, save_tiny

from core_runner import SamplingParams

pytestmark = pytest.mark.gpu
MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("name", TINY)
def test_equals_full_recomputation(name: str, tmp_path: Path, drained: Drained) -> None:
    # Head sizes of at least 16 are what the tiles of attention can take.
    sizes = {} if name in ("mamba", "falcon_mamba", "mamba2") else {"hidden_size": 64}
    sizes |= {"mamba_d_head": 16} if "mamba_d_head" in TINY[name][1] else {}
    sizes |= {"mamba_d_ssm": 128} if "mamba_d_ssm" in TINY[name][1] else {}
    sizes |= {"head_dim": 16} if "head_dim" in TINY[name][1] and "hidden_size" in sizes else {}
    model = save_tiny(name, tmp_path, **sizes).to("cuda")
    draw = random.Random(11)
    prompts = [[draw.randrange(3, 211) for _ in range(n)] for n in (1, 3, 17, 64, 80)]
    references = [recomputed_reference(model, prompt, MAX_TOKENS) for prompt in prompts]
    llm = drained(
        str(tmp_path),
        device="cuda",
        dtype="float32",
        block_size=16,
        max_num_reqs=4,
        max_model_len=128,
        max_num_batched_tokens=23,
        num_blocks=40,
        model_options={"state_block_size": 16},
    )
    skipped = 0
    for _ in ("cold", "warm"):
        for output, reference in zip(llm.generate(prompts, GREEDY), references, strict=True):
            skipped += assert_exact(
                output.outputs[0], reference, f"{name}, {len(output.prompt_token_ids)} tokens"
            )
    assert skipped <= MAX_TOKENS
    assert llm.stats().step_ways["step graph"] > 0


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
