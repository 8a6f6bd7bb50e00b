"""Many files at once: the samples of each, in processes that come and go."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.recordings import RATE, chirp, encode, wav

from core_runner.audio import AudioPool, load_audio
from core_runner.errors import AudioError


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """A file that takes a while to decode."""
    path = tmp_path_factory.mktemp("audio") / "long.wav"
    path.write_bytes(wav(np.zeros((2, 48_000 * 300), np.float32), 48_000, "u1"))
    return path


def running(pool):
    return [process._process for process in pool._processes if process._process is not None]


def attempt(load, source):
    try:
        return load(source, RATE)
    except AudioError as error:
        return str(error)


def test_every_source_gives_what_it_gives_alone(tmp_path, caplog):
    mp3 = encode(chirp(RATE, 2.0), RATE, "mp3", "libmp3lame")
    flac = encode(chirp(44_100, 1.0, 2), 44_100, "flac", "flac")
    (tmp_path / "a.mp3").write_bytes(mp3)
    (tmp_path / "b.txt").write_text("no audio\n" * 9)
    plain = wav(chirp(RATE, 1.0), RATE, "i2")
    cut = mp3[: len(mp3) // 2]
    sources = [tmp_path / "a.mp3", flac, "gone", str(tmp_path / "b.txt"), plain, cut, bytearray(mp3), b""]
    expected = [attempt(load_audio, source) for source in sources]
    warnings = sorted(record.getMessage() for record in caplog.records)
    caplog.clear()
    with AudioPool(2) as pool, ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda source: attempt(pool.load, source), sources))
        assert 1 <= len(running(pool)) <= 2
    for result, alone in zip(results, expected, strict=True):
        assert type(result) is type(alone)
        np.testing.assert_array_equal(result, alone)
    assert sorted(record.getMessage() for record in caplog.records) == warnings
    assert running(pool) == []


def test_what_needs_no_decoder_starts_no_process(tmp_path):
    with AudioPool() as pool:
        assert len(pool.load(wav(chirp(RATE, 1.0), RATE, "i2"), RATE)) == RATE
        with pytest.raises(AudioError, match="No such file"):
            pool.load(tmp_path / "gone.mp3", RATE)
        assert running(pool) == []


def test_one_process_serves_many_files():
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    with AudioPool() as pool:
        for _ in range(5):
            assert len(pool.load(data, RATE)) == RATE
        assert len(running(pool)) == 1


def test_a_file_that_kills_its_decoder_kills_no_other(long_file):
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    with AudioPool(1) as pool, ThreadPoolExecutor(1) as threads:
        pool.load(data, RATE)
        (process,) = running(pool)
        future = threads.submit(attempt, pool.load, long_file)
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGSEGV)
        assert future.result() == f"{long_file}: the decoder ended on it (exit status -11); convert it first"
        assert len(pool.load(data, RATE)) == RATE
        assert running(pool) != [process]


def test_closing_does_not_wait_for_files(long_file):
    with ThreadPoolExecutor(2) as threads:
        pool = AudioPool(1)
        pool.load(encode(chirp(RATE, 1.0), RATE, "flac", "flac"), RATE)
        (process,) = running(pool)
        futures = [threads.submit(attempt, pool.load, long_file) for _ in range(2)]
        time.sleep(0.1)
        pool.close()
        assert process.poll() is not None
        assert all(isinstance(future.result(), str) for future in futures)
        assert running(pool) == []


def test_the_callers_import_paths_are_the_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    with AudioPool(1) as pool:
        assert len(pool.load(encode(chirp(RATE, 1.0), RATE, "flac", "flac"), RATE)) == RATE
