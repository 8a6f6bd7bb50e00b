"""Where a recording is found to hold speech, and where it is cut."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from model_states_whisper.activity import Stretch, find_speech, frame_levels, map_speech, pack

RATE = 16000
LONGEST = 30 * RATE


def babble(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise in syllables, five a second, each of a loudness of its own: changing all the time, as speech does."""
    draw = np.random.default_rng(seed)
    t = np.arange(round(seconds * RATE)) / RATE
    loudness = draw.uniform(0.2, 1.0, int(5 * seconds) + 2)[(5 * t).astype(int)]
    envelope = loudness * np.sin(np.pi * (5 * t % 1.0)) ** 2
    return 0.3 * envelope * draw.standard_normal(len(t))


def recording(
    seconds: float, stretches: Sequence[tuple[float, float]], snr: float, seed: int = 0
) -> np.ndarray:
    """Babble from and to these times, in noise that is `snr` decibels below it; float32."""
    noise = 10 ** (-snr / 20) * 0.1 * np.random.default_rng(seed + 1).standard_normal(round(seconds * RATE))
    for number, (start, end) in enumerate(stretches):
        piece = noise[round(start * RATE) : round(end * RATE)]
        piece += babble(end - start, seed + number)[: len(piece)]
    return noise.astype(np.float32)


def seconds_of(windows: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    return [(start / RATE, end / RATE) for start, end in windows]


@pytest.mark.parametrize("snr", [80.0, 40.0, 20.0, 10.0, 5.0])
def test_speech_is_found_in_noise_and_long_pauses_are_left_out(snr: float) -> None:
    spoken = [(2.0, 5.0), (6.0, 13.0), (25.0, 26.0), (40.0, 58.0), (58.6, 72.0)]
    speech = map_speech(recording(80, spoken, snr), RATE, LONGEST)
    windows = seconds_of(speech.windows)
    assert len(windows) == 4
    for (start, end), (first, last) in zip(windows, [(2, 13), (25, 26), (40, 58), (58.6, 72)], strict=True):
        assert first - 0.5 <= start <= first + 0.05
        assert last - 0.15 <= end <= last + 0.5
    assert speech.seconds(0, 80 * RATE) == pytest.approx(sum(b - a for a, b in spoken), rel=0.06)
    assert speech.seconds(14 * RATE, 24 * RATE) == 0.0
    assert speech.seconds(7 * RATE, 9 * RATE) == pytest.approx(2.0)


@pytest.mark.parametrize("gain", [1e-3, 1e-2, 1.0])
def test_how_loud_a_recording_is_does_not_matter(gain: float) -> None:
    samples = recording(40, [(2.0, 5.0), (20.0, 31.0)], 30)
    quiet, usual = (
        seconds_of(map_speech(x.astype(np.float32), RATE, LONGEST).windows) for x in (gain * samples, samples)
    )
    np.testing.assert_allclose(quiet, usual, atol=0.05)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(0),
        np.zeros(100),
        np.zeros(30 * RATE),
        np.full(30 * RATE, 0.5),
        *(level * np.random.default_rng(0).standard_normal(30 * RATE) for level in (1e-4, 1e-2, 1.0)),
        np.sin(2 * np.pi * 100 * np.arange(20 * RATE) / RATE),
    ],
    ids=["nothing", "a frame", "zeros", "offset", "faint noise", "noise", "loud noise", "hum"],
)
def test_silence_and_what_never_changes_has_no_windows(samples: np.ndarray) -> None:
    speech = map_speech(samples.astype(np.float32), RATE, LONGEST)
    assert list(speech.windows) == []
    assert speech.seconds(0, len(samples)) == 0.0


@pytest.mark.parametrize("seconds", [7.7, 20.0, 50.0])
@pytest.mark.parametrize("level", [1e-3, 1e-2])
@pytest.mark.parametrize("around", [0.0, 1e-4])
def test_noise_that_sets_in_and_ends_is_no_speech(seconds: float, level: float, around: float) -> None:
    """Between two stretches of speech in a quieter recording, and not aligned with seconds."""
    length = 20.3 + seconds
    draw = np.random.default_rng(2)
    samples = around * draw.standard_normal(round(length * RATE))
    noise = slice(round(10.3 * RATE), round((10.3 + seconds) * RATE))
    samples[noise] = level * draw.standard_normal(noise.stop - noise.start)
    spoken = [(6.0, 10.0), (length - 9.5, length - 5.5)]
    for start, _ in spoken:
        samples[round(start * RATE) :][: 4 * RATE] += babble(4.0)
    windows = seconds_of(map_speech(samples.astype(np.float32), RATE, LONGEST).windows)
    assert len(windows) == 2
    for (start, end), (first, last) in zip(windows, spoken, strict=True):
        assert first - 1.3 <= start <= first + 0.05
        assert last - 0.15 <= end <= last + 1.3


def test_a_click_is_no_speech() -> None:
    samples = recording(20, [(5.0, 8.0)], 40)
    samples[15 * RATE : 15 * RATE + 300] = 0.9
    ((start, end),) = seconds_of(map_speech(samples, RATE, LONGEST).windows)
    assert start < 5.0
    assert end < 9.0


def test_speech_without_a_pause_is_cut_at_its_quietest_points() -> None:
    """Every syllable of the babble ends in silence; a few of them are followed by 0.2 s more."""
    pauses = [13.0, 26.0, 41.0, 52.5, 77.0]
    samples = recording(90, [(0.0, 90.0)], 60)
    for pause in pauses:
        samples[round(pause * RATE) : round((pause + 0.2) * RATE)] *= 1e-3
    windows = seconds_of(map_speech(samples, RATE, LONGEST).windows)
    assert [round(end, 1) for _, end in windows[:-1]] == [26.1, 52.6, 77.1]
    assert [start for start, _ in windows[1:]] == [end for _, end in windows[:-1]]
    assert windows[-1][1] == pytest.approx(90.0, abs=0.2)


def test_a_recording_ends_where_its_samples_do() -> None:
    samples = recording(3.1234, [(0.0, 3.1234)], 60)
    ((start, end),) = map_speech(samples, RATE, LONGEST).windows
    assert 0 <= start < RATE // 4
    assert end <= len(samples)


def test_no_window_is_too_long_and_none_overlaps() -> None:
    draw = np.random.default_rng(4)
    levels = draw.uniform(-60, -20, 60_000).astype(np.float32)
    for _ in range(200):
        edges = np.sort(draw.choice(60_000, 2 * int(draw.integers(1, 60)), replace=False))
        stretches = [Stretch(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        windows = pack(stretches, levels, 3000)
        assert all(0 < end - start <= 3000 for start, end in windows)
        assert all(before.end <= after.start for before, after in pairwise(windows))
        covered = np.zeros(60_000, dtype=bool)
        for start, end in windows:
            covered[start:end] = True
        assert all(covered[start:end].all() for start, end in stretches)


def test_windows_are_as_full_as_pauses_allow() -> None:
    levels = np.zeros(20_000, dtype=np.float32)
    short = [Stretch(start, start + 200) for start in range(0, 9000, 300)]
    assert pack(short, levels, 3000) == [Stretch(0, 2900), Stretch(3000, 5900), Stretch(6000, 8900)]
    apart = [Stretch(0, 200), Stretch(701, 900)]
    assert pack(apart, levels, 3000) == apart, "a pause of more than five seconds is not decoded"
    levels[2500] = -50.0
    long = [Stretch(0, 300), Stretch(400, 3300)]
    windows = pack(long, levels, 3000)
    assert windows[0].start == 0
    assert abs(windows[0].end - 2500) <= 20, "rather than a window of three seconds and one of thirty"
    assert windows[1] == Stretch(windows[0].end, 3300)


def test_little_is_held_beside_the_samples() -> None:
    samples = np.tile(recording(60, [(1.0, 20.0), (25.0, 55.0)], 30), 10)
    tracemalloc.start()
    speech = map_speech(samples, RATE, LONGEST)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(speech.windows) >= 20
    assert peak < samples.nbytes / 5


def test_levels_are_power_without_the_mean() -> None:
    samples = np.concatenate(
        [np.full(160, 0.5), 0.5 + 0.1 * np.tile([1.0, -1.0], 80), 0.1 * np.tile([1, -1], 4)]
    )
    levels = frame_levels(samples.astype(np.float32), 160)
    assert levels[1:] == pytest.approx([-20.0, -20.0], abs=0.01)
    assert levels[0] < -60.0
    assert find_speech(levels[:0]).tolist() == []
