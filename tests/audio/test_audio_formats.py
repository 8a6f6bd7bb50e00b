"""Whatever people record in gives the samples that were recorded."""

from __future__ import annotations

import numpy as np
import pytest
from support.recordings import RATE, chirp, encode, shift_and_likeness, wav

from core_runner.audio import load_audio

# Container, codec, options; those in the second list lose something, and may shift by a part of a frame.
LOSSLESS = [
    ("wav", "pcm_s16le", {}),
    ("wav", "pcm_s24le", {}),
    ("wav", "pcm_f32le", {}),
    ("w64", "pcm_s16le", {}),
    ("aiff", "pcm_s16be", {}),
    ("flac", "flac", {}),
    ("caf", "pcm_s16le", {}),
    ("matroska", "flac", {}),
    ("mov", "pcm_s16le", {}),
    ("ipod", "alac", {}),
]
LOSSY = [
    ("mp3", "libmp3lame", {}),
    ("adts", "aac", {}),
    ("ipod", "aac", {}),
    ("ogg", "libopus", {}),
    ("ogg", "vorbis", {"strict": "experimental"}),
    ("webm", "libopus", {}),
    ("matroska", "aac", {}),
    ("asf", "wmav2", {"b": "96k"}),
    ("wav", "adpcm_ima_wav", {}),
]


@pytest.mark.parametrize(("container", "codec", "options"), LOSSLESS, ids=lambda value: str(value))
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_lossless_formats_give_the_samples(container, codec, options, rate):
    data = encode(chirp(rate, 1.5, 2), rate, container, codec, options=options)
    samples = load_audio(data, RATE)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 1.5 * RATE) <= 1
    expected = chirp(RATE, 1.5)[0][: len(samples)]
    inner = slice(200, -200)  # a resampler hears silence before the first sample and after the last
    np.testing.assert_allclose(samples[: len(expected)][inner], expected[inner], atol=2e-4)


@pytest.mark.parametrize(("container", "codec", "options"), LOSSY, ids=lambda value: str(value))
def test_lossy_formats_give_nearly_the_samples(container, codec, options):
    rate = 48_000
    samples = load_audio(encode(chirp(rate, 2.0, 2), rate, container, codec, options=options), RATE)
    assert abs(len(samples) / RATE - 2.0) < 0.08
    shift_s, likeness = shift_and_likeness(samples, chirp(RATE, 2.0)[0])
    assert abs(shift_s) < 0.05
    assert likeness > 0.98


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "avi"])
def test_videos_give_their_sound(container):
    data = encode(chirp(44_100, 2.0, 2), 44_100, container, "aac", with_video=True)
    samples = load_audio(data, RATE)
    assert abs(len(samples) / RATE - 2.0) < 0.08
    shift_s, likeness = shift_and_likeness(samples, chirp(RATE, 2.0)[0])
    assert abs(shift_s) < 0.05
    assert likeness > 0.98


@pytest.mark.parametrize("kind", ["u1", "i2", "i3", "i4", "f4", "f8"])
@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_plain_wav_of_any_width_rate_and_channels(kind, rate, channels):
    data = wav(chirp(rate, 0.5, channels), rate, kind, extensible=channels == 2)
    samples = load_audio(data, RATE)
    assert abs(len(samples) - RATE // 2) <= 1
    expected = chirp(RATE, 0.5)[0][: len(samples)]
    inner = slice(300, -300)
    np.testing.assert_allclose(
        samples[: len(expected)][inner], expected[inner], atol=0.015 if kind == "u1" else 2e-4
    )


@pytest.mark.parametrize("kind", ["u1", "i2", "i3", "i4", "f4", "f8"])
def test_our_wav_reader_says_what_ffmpeg_says(kind, monkeypatch):
    data = wav(np.stack([chirp(RATE, 0.3)[0], -0.3 * chirp(RATE, 0.3)[0]]), RATE, kind)
    ours = load_audio(data, RATE)
    monkeypatch.setattr("core_runner.audio.load.find_plain_wav", lambda file: None)
    np.testing.assert_allclose(ours, load_audio(data, RATE), atol=1e-6)


def test_stereo_is_the_mean_of_its_sides():
    left, right = chirp(RATE, 0.2)[0], np.full(RATE // 5, 0.25, np.float32)
    for data in (
        wav(np.stack([left, right]), RATE, "f4"),
        encode(np.stack([left, right]), RATE, "matroska", "pcm_f32le"),
    ):
        np.testing.assert_allclose(load_audio(data, RATE), (left + right) / 2, atol=1e-6)


def test_six_channels_are_mixed_by_what_they_are_for():
    speech = chirp(48_000, 0.5)[0]
    loudness = {}
    for place, name in enumerate(["front left", "front right", "centre", "low", "back left", "back right"]):
        channels = np.zeros((6, len(speech)), np.float32)
        channels[place] = speech
        samples = load_audio(encode(channels, 48_000, "flac", "flac", layout="5.1"), RATE)
        loudness[name] = float(np.abs(samples).max())
    assert loudness["low"] == 0.0
    assert loudness["centre"] > loudness["front left"] == pytest.approx(loudness["front right"], abs=1e-3)
    assert loudness["front left"] > loudness["back left"] == pytest.approx(loudness["back right"], abs=1e-3)
    # No more than full when all of them are loud.
    assert sum(loudness.values()) <= 0.41


def test_channels_that_nobody_named_are_all_heard():
    data = wav(chirp(RATE, 0.3, 10), RATE, "i2")
    samples = load_audio(data, RATE)
    np.testing.assert_allclose(samples, chirp(RATE, 0.3)[0], atol=1e-3)


def test_louder_than_full_is_clipped():
    data = wav(np.zeros((1, 100), np.float32), RATE, "f4")[:-400] + np.full(100, 3.0, "<f4").tobytes()
    assert load_audio(data, RATE).tolist() == [1.0] * 100
