"""Empty, cut short, damaged, silent and very long input: what can be decoded and a warning, or an error by name."""

from __future__ import annotations

import io
import logging
import os
import struct
import sys
import tracemalloc

import av
import numpy as np
import pytest
from support.recordings import RATE, chirp, encode, shift_and_likeness, wav

import core_runner.audio.decode as decode_module
from core_runner.audio import load_audio
from core_runner.audio.buffer import SampleBuffer
from core_runner.errors import AudioError, RequestError

MP3 = ("mp3", "libmp3lame")
WHOLE = {
    "flac": lambda: encode(chirp(RATE, 4.0), RATE, "flac", "flac"),
    "mp3": lambda: encode(chirp(RATE, 4.0), RATE, *MP3),
    "mkv": lambda: encode(chirp(RATE, 4.0), RATE, "matroska", "pcm_s16le"),
    "wav": lambda: wav(chirp(RATE, 4.0), RATE, "i2"),
    "wav at another rate": lambda: wav(chirp(44_100, 4.0), 44_100, "i2"),
}


def refusal(source) -> str:
    with pytest.raises(AudioError) as caught:
        load_audio(source, RATE)
    assert isinstance(caught.value, RequestError)
    return str(caught.value)


def attempt(source) -> str:
    """The number of samples, or what is wrong."""
    try:
        return str(len(load_audio(source, RATE)))
    except AudioError as error:
        return str(error)


def test_what_is_no_audio_is_refused_by_name(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("nothing to hear\n" * 50)
    empty = tmp_path / "empty.mp3"
    empty.touch()
    (tmp_path / "noise.flac").write_bytes(np.random.default_rng(0).bytes(5000))
    for path, reason in (
        (text, "no audio"),
        (empty, "no audio"),
        (tmp_path / "noise.flac", "no audio"),
        (tmp_path / "gone.wav", "No such file"),
        (tmp_path, "Is a directory"),
        ("nul\0l.wav", "null"),
    ):
        message = refusal(path)
        assert message.startswith(f"{path}: ")
        assert reason in message
    assert refusal(b"").startswith("audio of 0 bytes: ")
    assert "type int" in refusal(3)
    assert "binary mode" in refusal(io.StringIO("x"))
    # Not an address, whatever it looks like.
    assert "No such file" in refusal("http://example.org/a.mp3")


def test_a_video_without_sound_says_so(tmp_path):
    path = tmp_path / "silent film.mp4"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        output.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        output.mux(stream.encode(None))
    assert refusal(path) == f"{path}: has no audio (video only)"


@pytest.mark.parametrize("data", [wav(np.zeros((1, 0), np.float32), RATE, "i2"), b"RIFF\0\0\0\0WAVE"])
def test_files_without_samples_are_refused(data):
    assert "no audio" in refusal(data)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(bad):
    samples = np.full(500, bad, "<f4")
    data = wav(np.zeros((1, 500), np.float32), RATE, "f4")[:-2000] + samples.tobytes()
    if np.isnan(bad):
        assert "no numbers (NaN)" in refusal(data)
    else:  # as loud as can be
        assert set(load_audio(data, RATE)) == {np.sign(bad)}


@pytest.mark.parametrize("kind", WHOLE)
def test_files_that_are_cut_short_give_what_is_there(kind, caplog):
    whole = WHOLE[kind]()
    samples = load_audio(whole, RATE)
    assert caplog.text == ""
    cut = load_audio(whole[: len(whole) // 2], RATE)
    assert 0.3 < len(cut) / len(samples) < 0.6
    inner = slice(2000, 20_000)
    np.testing.assert_allclose(cut[inner], samples[inner], atol=1e-3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is damaged: " in record.getMessage()
    assert "s of 4." in record.getMessage()


def test_a_file_whose_end_holds_its_table_is_refused_when_cut_short():
    whole = encode(chirp(RATE, 2.0), RATE, "mp4", "aac")
    assert "no audio that can be read" in refusal(whole[: len(whole) // 2])


@pytest.mark.parametrize("codec", ["flac", "aac", "libopus"])
def test_what_follows_damage_keeps_its_time(codec, caplog):
    rate = 48_000
    whole = bytearray(encode(chirp(rate, 12.0), rate, "matroska", codec))
    middle, size = len(whole) // 2, len(whole) // 20
    whole[middle : middle + size] = np.random.default_rng(1).bytes(size)
    samples = load_audio(bytes(whole), RATE)
    assert abs(len(samples) / RATE - 12.0) < 0.1
    end = slice(round(10.5 * RATE), round(11.9 * RATE))  # the container picks up where its next part begins
    shift_s, likeness = shift_and_likeness(samples[end], chirp(RATE, 12.0)[0][end])
    assert abs(shift_s) < 0.06
    assert likeness > 0.95


def test_gaps_in_a_recording_are_silence():
    """A browser that records in pieces leaves gaps; so do videos whose sound begins late."""
    rate, first, second = 48_000, slice(0, 48_000), slice(48_000, 96_000)
    data = encode(chirp(rate, 2.0), rate, "webm", "libopus", pieces=((0.0, first), (2.5, second)))
    samples = load_audio(data, RATE)
    assert len(samples) / RATE == pytest.approx(3.5, abs=0.05)
    assert np.abs(samples[round(1.1 * RATE) : round(2.4 * RATE)]).max() == 0.0
    shift_s, likeness = shift_and_likeness(samples[round(2.5 * RATE) :], chirp(RATE, 2.0)[0][RATE:])
    assert abs(shift_s) < 0.03
    assert likeness > 0.95


@pytest.mark.parametrize(("second_s", "seconds"), [(3000.0, 3001.0), (4000.0, 2.0)])
def test_a_gap_of_hours_is_a_damaged_timestamp(second_s, seconds):
    parts = ((0.0, slice(0, RATE)), (second_s, slice(RATE, 2 * RATE)))
    data = encode(chirp(RATE, 2.0), RATE, "matroska", "pcm_s16le", pieces=parts)
    assert len(load_audio(data, RATE)) / RATE == pytest.approx(seconds, abs=0.01)


def test_sound_that_begins_after_the_picture_keeps_its_time():
    data = encode(
        chirp(RATE, 1.0), RATE, "matroska", "pcm_s16le", with_video=True, pieces=((0.8, slice(None)),)
    )
    samples = load_audio(data, RATE)
    assert len(samples) / RATE == pytest.approx(1.8, abs=0.01)
    assert np.abs(samples[: round(0.79 * RATE)]).max() == 0.0
    assert np.abs(samples[round(0.82 * RATE) :]).max() > 0.3


def test_the_first_moment_of_a_stream_is_its_beginning():
    """A stream that was cut out of a longer one starts at some hour; nobody waits for that in silence."""
    data = encode(chirp(RATE, 1.0), RATE, "mpegts", "libmp3lame", pieces=((5000.0, slice(None)),))
    assert len(load_audio(data, RATE)) / RATE == pytest.approx(1.0, abs=0.15)


def test_a_stream_that_begins_on_the_way_is_no_damage(monkeypatch):
    """As in a broadcast whose subtitles begin later: at the end of such a file PyAV trips over its list of streams."""
    whole = encode(chirp(RATE, 2.0), RATE, "mpegts", "libmp3lame")
    expected = load_audio(whole, RATE)

    class Trips:
        def __init__(self, container):
            self._container = container

        def __getattr__(self, name):
            return getattr(self._container, name)

        def demux(self, stream):
            yield from self._container.demux(stream)
            raise IndexError("list index out of range")

    begin = decode_module._Frames.__init__
    monkeypatch.setattr(
        decode_module._Frames,
        "__init__",
        lambda self, container, stream: begin(self, Trips(container), stream),
    )
    np.testing.assert_array_equal(load_audio(whole, RATE), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rate_and_channels_may_change_on_the_way(order):
    parts = [
        encode(chirp(44_100, 1.0, 2), 44_100, "adts", "aac"),
        encode(chirp(24_000, 1.0), 24_000, "adts", "aac"),
    ]
    samples = load_audio(b"".join(parts[index] for index in order), RATE)
    assert len(samples) / RATE == pytest.approx(2.0, abs=0.15)
    # The encoder begins with a bang.
    for part in (samples[2000:16_000], samples[20_000:32_000]):
        assert np.abs(part).max() == pytest.approx(0.4, abs=0.03)
        assert np.convolve(np.abs(part), np.ones(200), "valid").min() > 10.0


def test_one_sample_and_silence_are_audio():
    assert load_audio(wav(np.full((1, 1), 0.5, np.float32), RATE, "f4"), RATE).tolist() == [0.5]
    assert len(load_audio(wav(np.full((1, 480), 0.5, np.float32), 48_000, "f4"), RATE)) == 160
    assert len(load_audio(wav(np.full((1, 5), 0.5, np.float32), 48_000, "f4"), RATE)) == 2
    assert "not even 10 ms" in refusal(wav(np.full((1, 5), 0.5, np.float32), 48_017, "f4"))
    assert not load_audio(encode(np.zeros((1, RATE), np.float32), RATE, "flac", "flac"), RATE).any()


def test_tags_in_any_encoding_do_not_matter():
    tag = b"TIT2" + struct.pack(">I", 6) + b"\0\0" + b"\3\xff\xfe\xfd\xe9\x80"  # said to be UTF-8
    data = b"ID3\3\0\0" + bytes([0, 0, 0, len(tag)]) + tag + encode(chirp(RATE, 1.0), RATE, *MP3)
    assert len(load_audio(data, RATE)) > 0.9 * RATE


def test_a_playlist_reads_no_other_file(tmp_path):
    (tmp_path / "secret.ts").write_bytes(encode(chirp(RATE, 1.0), RATE, "mpegts", "libmp3lame"))
    listing = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{tmp_path}/secret.ts\n#EXT-X-ENDLIST\n"
    (tmp_path / "list.m3u8").write_text(listing)
    refusal(tmp_path / "list.m3u8")
    refusal(f"ffconcat version 1.0\nfile '{tmp_path}/secret.ts'\n".encode())


def test_an_hour_fits_in_its_own_size(tmp_path):
    path = tmp_path / "hour.wav"
    head = wav(np.zeros((1, 0), np.float32), RATE, "i2")
    size = 2 * 3600 * RATE
    with path.open("wb") as file:
        file.write(head[:-4] + struct.pack("<I", size))
        file.truncate(len(head) + size)  # zeros that take no room on the disk
    tracemalloc.start()
    samples = load_audio(path, RATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == 3600 * RATE
    assert peak < samples.nbytes + (16 << 20)


def test_another_rate_is_never_held_as_a_whole(tmp_path):
    path = tmp_path / "studio.wav"
    path.write_bytes(wav(np.zeros((2, 96_000 * 40), np.float32), 96_000, "i2"))
    tracemalloc.start()
    samples = load_audio(path, RATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == 40 * RATE
    assert peak < samples.nbytes + (16 << 20) < 2 * 4 * 96_000 * 40


def test_days_of_silence_are_refused():
    buffer = SampleBuffer("bomb.flac", 100, expected_s=1e12)
    buffer.append_silence(24 * 3600)
    with pytest.raises(AudioError, match=r"bomb\.flac: is longer than 24 hours"):
        buffer.append_silence(0.01)


@pytest.mark.parametrize("rate", [1, 999, 1_000_001, 2**32 - 1])
def test_a_rate_that_no_recording_has_is_refused(rate):
    data = bytearray(wav(np.zeros((1, 5000), np.float32), 8000, "u1"))
    data[24:28] = struct.pack("<I", rate)
    assert f"{rate} samples a second are no recording's" in refusal(bytes(data))


@pytest.mark.parametrize("container", ["wav", "flac", "mp3", "mp4", "matroska", "ogg", "caf", "aiff"])
def test_damage_anywhere_gives_audio_or_an_error_of_ours(container):
    """A few of the many files that a longer search tried."""
    codec = {"flac": "flac", "mp3": "libmp3lame", "mp4": "aac", "ogg": "libopus", "aiff": "pcm_s16be"}
    rate = 48_000
    whole = encode(chirp(rate, 0.3, 2), rate, container, codec.get(container, "pcm_s16le"))
    random = np.random.default_rng(7)
    for _ in range(40):
        data = bytearray(whole)
        places = random.integers(0, min(len(data), int(random.choice([60, 400, 10**6]))), 3)
        for place in places:
            data[place] = random.choice([0, 127, 128, 255])
        outcome = attempt(bytes(data))
        assert outcome.startswith("audio of ") or int(outcome) > 0


def test_without_the_extra_wav_at_usual_rates_is_read(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)
    for rate in (8_000, RATE, 44_100):
        assert len(load_audio(wav(chirp(rate, 0.5, 2), rate, "i2"), RATE)) == RATE // 2
    for name, data in (("a.mp3", b"ID3"), ("b.wav", wav(chirp(8_017, 0.5), 8_017, "i2"))):
        (tmp_path / name).write_bytes(data)
        message = refusal(tmp_path / name)
        assert message.startswith(f"{tmp_path / name}: ")
        assert 'pip install "core-runner[audio]"' in message


@pytest.mark.parametrize("rate", [0, -1, 16_000.0, None])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(AudioError, match="sampling_rate="):
        load_audio(wav(chirp(RATE, 0.1), RATE, "i2"), rate)


class OnlyReads(io.RawIOBase):
    """A stream that can neither seek nor tell."""

    def __init__(self, data):
        self._file = io.BytesIO(data)

    def readable(self):
        return True

    def readinto(self, buffer):
        return self._file.readinto(buffer)


@pytest.mark.parametrize("kind", ["flac", "wav", "mp4"])
def test_any_binary_file_will_do(kind, tmp_path):
    data = WHOLE[kind]() if kind in WHOLE else encode(chirp(RATE, 2.0), RATE, "mp4", "aac")
    expected = load_audio(data, RATE)
    path = tmp_path / f"ä ö.{kind}"
    path.write_bytes(data)
    begun = io.BytesIO(b"before" + data)
    begun.seek(6)
    reader, writer = os.pipe()
    os.write(writer, data[:60_000] if len(data) <= 60_000 else b"")
    os.close(writer)
    sources = [path, str(path), bytearray(data), memoryview(data), io.BytesIO(data), OnlyReads(data), begun]
    for source in sources:
        np.testing.assert_array_equal(load_audio(source, RATE), expected)
    with path.open("rb") as file, open(reader, "rb") as pipe:
        np.testing.assert_array_equal(load_audio(file, RATE), expected)
        assert not file.closed
        if len(data) <= 60_000:
            np.testing.assert_array_equal(load_audio(pipe, RATE), expected)
