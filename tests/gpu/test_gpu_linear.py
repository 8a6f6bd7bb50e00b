"""Models with linear layers on a GPU: compiled kernels, recorded steps, tokens equal to full recomputation."""

from __future__ import annotations

from pathlib import Path

import pytest
from linear.tiny import TINY, save_tiny
from support.drained import Drained
from support.recurrent_exact import check_on_gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", TINY)
def test_equals_full_recomputation(name: str, tmp_path: Path, drained: Drained) -> None:
    # Head sizes of at least 16 are what the tiles of attention can take.
    sizes = {"hidden_size": 64, **({"head_dim": 16} if "head_dim" in TINY[name][1] else {})}
    check_on_gpu(name, tmp_path, save_tiny, sizes, drained)
