"""EXACT: every architecture, prompts of many lengths in chunks of many sizes, against full recomputation."""

from __future__ import annotations

import pytest
from linear.tiny import TINY
from support.drained import Drained
from support.recurrent_exact import BUDGETS, PROMPTS, check_exact, make_llm


@pytest.mark.parametrize("name", TINY)
def test_exact(name: str, tiny, drained: Drained) -> None:
    """Chunks of up to 7 tokens shared by 4 requests: chunks shorter than the convolution, decodes among prefills."""
    model = tiny(name)
    check_exact(model, make_llm(drained, model, 7), PROMPTS[:-1])


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "olmo_hybrid"])
def test_exact_in_one_chunk(name: str, tiny, drained: Drained) -> None:
    """With blocks of the default sizes."""
    model = tiny(name)
    check_exact(model, make_llm(drained, model, 64, block_size=16, model_options={}), PROMPTS[5:])


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", TINY)
def test_exact_in_chunks_of_every_size(name: str, budget: int, tiny, drained: Drained) -> None:
    model = tiny(name)
    check_exact(model, make_llm(drained, model, budget), PROMPTS)
