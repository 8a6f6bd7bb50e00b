"""EXACT: every architecture, prompts of many lengths in chunks of many sizes, against full recomputation."""

from __future__ import annotations

from itertools import cycle

import pytest
from linear.tiny import TINY
from support.drained import Drained
from support.recurrent_exact import BUDGETS, PROMPTS, check_exact, make_llm


@pytest.mark.parametrize("name", TINY)
def test_exact(name: str, tiny, drained: Drained) -> None:
    """Chunks of up to 7 tokens shared by 4 requests: chunks shorter than the convolution, decodes among prefills."""
    model = tiny(name)
    check_exact(model, make_llm(drained, model, 7), PROMPTS[:-1])


@pytest.mark.parametrize("name", TINY)
def test_exact_in_large_chunks(name: str, tiny, drained: Drained) -> None:
    """With blocks of the default sizes, and the longest prompt."""
    model = tiny(name)
    check_exact(model, make_llm(drained, model, 64, block_size=16, model_options={}), PROMPTS[5:])


@pytest.mark.parametrize(("name", "budget"), zip(TINY, cycle((1, 2, 3, 4))))
def test_exact_in_small_chunks(name: str, budget: int, tiny, drained: Drained) -> None:
    """Of each size for several architectures; all sizes for each are slow."""
    model = tiny(name)
    check_exact(model, make_llm(drained, model, budget), PROMPTS[:6])


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", TINY)
def test_exact_in_chunks_of_every_size(name: str, budget: int, tiny, drained: Drained) -> None:
    model = tiny(name)
    check_exact(model, make_llm(drained, model, budget), PROMPTS)
