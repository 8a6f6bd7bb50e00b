"""`HitWatch`: one warning when prompts repeat without a hit, and none in any other case."""

from __future__ import annotations

import logging

import pytest

from core_runner import SamplingParams
from core_runner.request import Request
from core_runner.scheduling.hit_watch import HitWatch


def _note(watch: HitWatch, times: int, num_cached: int = 0, first: int = 3, length: int = 40) -> None:
    for index in range(times):
        prompt = [first] * 16 + list(range(length - 16))
        watch.note(Request(f"r{index}", prompt, SamplingParams()), num_cached)  # type: ignore[arg-type]


def test_repeated_prompts_without_a_hit_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = HitWatch(256)
    with caplog.at_level(logging.WARNING):
        _note(watch, 32)
        assert not caplog.records
        _note(watch, 1, length=50)
        _note(watch, 100)
    (record,) = caplog.records
    assert "multiple of 256 tokens" in record.getMessage()
    assert "had 50" in record.getMessage()


def test_a_hit_ends_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    watch = HitWatch(16)
    _note(watch, 20)
    _note(watch, 1, num_cached=16)
    _note(watch, 100)
    assert not caplog.records


def test_prompts_that_differ_are_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    watch = HitWatch(16)
    for first in range(200):
        _note(watch, 1, first=first)
    assert not caplog.records


def test_short_prompts_and_other_inputs_are_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Transcriptions have a few equal tokens each, and audio of their own."""
    watch = HitWatch(16)
    for index in range(200):
        watch.note(Request(f"a{index}", [3] * 4, SamplingParams()), 0)
        keys = {"audio": b"%d" % index}
        watch.note(Request(f"b{index}", [3] * 40, SamplingParams(), input_keys=keys), 0)
        inputs = {"recurrent_state": None}  # named by nobody, so that its blocks are shared with nobody
        watch.note(Request(f"d{index}", [5] * 40, SamplingParams(), model_inputs=inputs), 0)
        watch.note(Request(f"c{index}", [4] * 40, SamplingParams(cache_salt=f"{index}")), 0)
    assert not caplog.records
