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
