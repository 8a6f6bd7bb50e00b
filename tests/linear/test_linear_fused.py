"""Linear models run as a whole loop, and such a loop and transformers' own layers give the same."""

from __future__ import annotations

import pytest
from linear.tiny import TINY
from support.drained import Drained
from support.recurrent_exact import check_fused_and_plain


@pytest.mark.parametrize("name", TINY)
def test_fused_and_plain_layers_give_the_same(name: str, tiny, drained: Drained) -> None:
    check_fused_and_plain(tiny(name), True, drained)
