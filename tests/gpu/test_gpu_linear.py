"""Models with linear layers on a GPU: compiled kernels, recorded steps, tokens equal to full recomputation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from linear.tiny import TINY, save_tiny
from support.drained import Drained
from support.reference import assert_exact
from support.tiny_recurrent import recomputed_reference

from core_runner import SamplingParams

pytestmark = pytest.mark.gpu
MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("name", TINY)
def test_equals_full_recomputation(name: str, tmp_path: Path, drained: Drained) -> None:
    # Head sizes of at least 16 are what the tiles of attention can take.
    sizes = {"hidden_size": 64, **({"head_dim": 16} if "head_dim" in TINY[name][1] else {})}
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
            skipped += assert_exact(output.outputs[0], reference, f"{len(output.prompt_token_ids)} tokens")
    assert skipped <= MAX_TOKENS
    assert llm.stats().step_ways["step graph"] > 0
