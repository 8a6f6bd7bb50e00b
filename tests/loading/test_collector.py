"""Loading holds off the garbage collector, and leaves it as it was."""

from __future__ import annotations

import gc

import pytest

from model_states.collector import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), collector_paused():
            raise KeyError(gc.isenabled())
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("somebody_freezes", [True, False])
def test_what_was_made_meanwhile_counts_as_old(somebody_freezes: bool, monkeypatch) -> None:
    if somebody_freezes:
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 5000)
    with collector_paused():
        made = [[] for _ in range(10_000)]
    young = sum(len(gc.get_objects(generation)) for generation in (0, 1))
    assert (young < len(made)) == (not somebody_freezes)
