"""Steps padded to a graph's size touch nobody's state (field report C-02), replayed on a CPU by `support.replays`."""

from __future__ import annotations

import pytest
from mamba.padded_steps import check_padding_rows_touch_nobody, make_runner
from support.replays import replayed_steps


@pytest.mark.parametrize("num_rows", [3, 5, 6, 7])
@pytest.mark.parametrize("name", ["bamba", "mamba"])
def test_padding_rows_touch_nobody(name: str, num_rows: int, tiny) -> None:
    model = tiny(name)
    with replayed_steps():
        runner = make_runner(model, device="cpu")
    check_padding_rows_touch_nobody(runner, model, num_rows)
