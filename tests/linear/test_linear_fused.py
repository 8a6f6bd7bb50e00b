"""Which linear models run as a whole loop, and that such a loop and transformers' own layers give the same."""

from __future__ import annotations

import pytest
from support.drained import Drained
from support.recurrent_exact import check_fused_and_plain

WHOLE = ("lfm2", "lfm2_biased", "lfm2_moe", "qwen3_5_only_linear", "olmo_hybrid")


@pytest.mark.parametrize("name", [*WHOLE, "qwen3_next", "qwen3_5"])
def test_fused_and_plain_layers_give_the_same(name: str, tiny, drained: Drained) -> None:
    check_fused_and_plain(tiny(name), name in WHOLE, drained)
