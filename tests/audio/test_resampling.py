"""The resamplers, FFmpeg's for odd rates, measured with sines: what they let through, and what they keep out."""

from __future__ import annotations

import numpy as np
import pytest
from support.recordings import RATE, encode, tone, wav

from core_runner.audio import load_audio
from core_runner.audio.buffer import SampleBuffer
from core_runner.audio.resample import Resampler, can_resample


def level(rate: int, hertz: float, seconds: float = 1.0) -> float:
    """Decibels that a tone in a file of `rate` has lost; edges, where it begins and ends, are left out."""
    samples = load_audio(wav(tone(rate, seconds, hertz)[None], rate, "f4"), RATE)
    inner = samples[RATE // 10 : -RATE // 10].astype(np.float64)
    return float(20 * np.log10(np.sqrt(2 * np.mean(inner**2)) / 0.5 + 1e-12))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 22_051, 44_100, 44_101, 48_000, 96_000])
def test_tones_below_half_the_lower_rate_pass(rate):
    half = min(rate, RATE) / 2
    assert [level(rate, share * half) for share in (0.01, 0.1, 0.5, 0.8, 0.9)] == pytest.approx(
        [0.0] * 5, abs=0.1
    )


@pytest.mark.parametrize("rate", [22_050, 22_051, 44_100, 44_101, 48_000, 96_000])
def test_tones_above_half_the_wanted_rate_are_gone(rate):
    tones = [share * RATE / 2 for share in (1.02, 1.05, 1.1, 1.3, 2.0, 2.5, 5.9) if share * RATE < rate]
    assert max(level(rate, hertz) for hertz in tones) < -60.0


@pytest.mark.parametrize("rate", [8_000, 8_001, 11_025])
def test_upsampling_adds_no_mirror_image(rate):
    samples = load_audio(wav(tone(rate, 1.0, 0.4 * rate)[None], rate, "f4"), RATE)
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    frequencies = np.fft.rfftfreq(len(samples), 1 / RATE)
    mirror = spectrum[(frequencies > 0.55 * rate) & (frequencies < 0.65 * rate)]
    assert mirror.max() < 1e-3 * spectrum.max()


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 44_101, 48_000, 96_000])
def test_nothing_is_shifted(rate):
    """A click in the middle of the file is in the middle of the samples, whichever way it is read."""
    click = np.zeros((1, rate), np.float32)
    width = rate // 1000
    click[0, rate // 2 - width : rate // 2 + width + 1] = 0.5 * np.hanning(2 * width + 1)
    for data in (wav(click, rate, "f4"), encode(click, rate, "matroska", "pcm_f32le")):
        samples = load_audio(data, RATE)
        assert abs(len(samples) - RATE) <= 1
        assert abs(int(np.argmax(np.abs(samples))) - RATE // 2) <= 1


def test_block_edges_do_not_show():
    """What is read in blocks equals what was resampled in one."""
    rate, seconds = 44_100, 14.0  # more than two blocks
    samples = load_audio(wav(tone(rate, seconds, 1000.0)[None], rate, "f4"), RATE)
    expected = tone(RATE, seconds, 1000.0)[: len(samples)]
    np.testing.assert_allclose(samples[: len(expected)][200:-200], expected[200:-200], atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_pieces_of_any_length_give_what_the_whole_gives(rate):
    random = np.random.default_rng(0)
    samples = random.normal(0, 0.1, rate * 2 + 77).astype(np.float32)
    cuts = np.sort(random.integers(0, len(samples), 60))
    results = []
    for pieces in ([samples], np.split(samples, cuts)):
        buffer = SampleBuffer("noise", RATE)
        resampler = Resampler(buffer, rate)
        for piece in pieces:
            resampler.feed(piece)
        resampler.flush()
        results.append(buffer.finish(None).samples)
    assert len(results[0]) == len(results[1]) == -(-len(samples) * RATE // rate)
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)


def test_a_constant_stays_what_it_is():
    samples = load_audio(wav(np.full((2, 44_100), 0.25, np.float32), 44_100, "f4"), RATE)
    np.testing.assert_allclose(samples[100:-100], 0.25, atol=1e-6)


def test_odd_rates_are_left_to_the_library():
    usual = (8000, 11_025, 12_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000, 192_000)
    assert all(can_resample(rate, wanted) for rate in usual for wanted in (16_000, 24_000))
    assert not any(can_resample(rate, 16_000) for rate in (7999, 12_345, 44_101, 399_968, 999_999))
    assert not can_resample(44_100, 1), "a filter of seconds"
