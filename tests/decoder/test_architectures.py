"""Every claimed architecture, EXACT against transformers.generate: alone, mixed, chunked, cached and preempted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.drained import Drained
from support.reference import assert_exact, greedy_reference
from support.tiny_models import TINY, save_tiny

from core_runner import SamplingParams

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)


def _prompts() -> list[list[int]]:
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 211) for _ in range(length)] for length in (1, 4, 8, 19, 37)]
    return [*prompts, prompts[4][:24] + prompts[3]]


@pytest.mark.parametrize("name", TINY)
def test_equals_transformers_generate(name: str, tmp_path: Path, drained: Drained) -> None:
    model = save_tiny(name, tmp_path)
    prompts = _prompts()
    references = [greedy_reference(model, prompt, MAX_TOKENS) for prompt in prompts]
    skipped = 0
    # The second run hits the first one's prefixes; the pool of the small one forces preemption.
    for options in ({"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 11, "num_blocks": 24}):
        llm = drained(str(tmp_path), device="cpu", block_size=4, max_num_reqs=4, max_model_len=128, **options)
        for run in ("cold", "warm"):
            outputs = llm.generate(prompts, GREEDY)
            for i, (output, reference) in enumerate(zip(outputs, references, strict=True)):
                skipped += assert_exact(output.outputs[0], reference, f"{name} {run} prompt {i} {options}")
    assert skipped <= MAX_TOKENS, f"{skipped} positions had too small a margin to compare"
