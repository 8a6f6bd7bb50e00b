"""Many files at once: the samples of each, in processes that stay, and end when they have to."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.recordings import RATE, chirp, encode, wav

from core_runner.audio import AudioPool, load_audio
from core_runner.errors import AudioError


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """A file that takes a while to decode."""
    path = tmp_path_factory.mktemp("audio") / "long.wav"
    path.write_bytes(wav(np.zeros((2, 48_017 * 300), np.float32), 48_017, "u1"))
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


def kill_next(pool, known):
    """Kill the process that runs beside those known, once it has begun with what it was started for."""
    while not (new := [process for process in running(pool) if process.pid not in known]):
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(new[0].pid, signal.SIGSEGV)
    return {*known, new[0].pid}


def test_a_file_that_kills_its_decoder_twice_is_refused_and_no_other(long_file):
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    with AudioPool(1) as pool, ThreadPoolExecutor(1) as threads:
        pool.load(data, RATE)
        future = threads.submit(attempt, pool.load, long_file)
        known = kill_next(pool, kill_next(pool, set()))
        assert future.result() == f"{long_file}: the decoder ended on it (exit status -11); convert it first"
        assert len(pool.load(data, RATE)) == RATE
        assert running(pool)[0].pid not in known


def test_a_file_whose_process_is_killed_once_is_read(long_file):
    with AudioPool(1) as pool, ThreadPoolExecutor(1) as threads:
        future = threads.submit(pool.load, long_file, RATE)
        kill_next(pool, set())
        assert len(future.result()) == 300 * RATE


def test_an_idle_process_that_was_killed_is_replaced():
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    with AudioPool(1) as pool:
        pool.load(data, RATE)
        (process,) = running(pool)
        process.kill()
        process.wait()
        assert len(pool.load(data, RATE)) == RATE


def test_a_process_that_died_idle_is_no_files_fault(monkeypatch):
    monkeypatch.setattr("core_runner.audio.pool._ATTEMPTS", 1)
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    with AudioPool(1) as pool:
        for _ in range(2):
            assert len(pool.load(data, RATE)) == RATE
            (process,) = running(pool)
            process.kill()
            process.wait()


def test_calls_that_are_given_up_leave_processes_that_work(long_file):
    """Readers that close while their files are read, beside one that goes on; every other load is right."""
    data = encode(chirp(RATE, 0.1), RATE, "flac", "flac")
    with AudioPool(2) as pool, ThreadPoolExecutor(4) as threads:

        def give_up(_):
            with pool.reader(2) as reader:
                waiting = threads.submit(attempt, reader.load, long_file)
                attempt(reader.load, data)
            return waiting.result()

        with ThreadPoolExecutor(2) as callers:
            given_up = callers.map(give_up, range(30))
            results = [attempt(pool.load, data) for _ in range(60)]
            assert all(isinstance(result, np.ndarray) or "given up" in result for result in given_up)
        assert [len(result) for result in results] == [RATE // 10] * 60
        assert len(pool.load(data, RATE)) == RATE // 10


def test_a_fork_has_processes_of_its_own():
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    with AudioPool(1) as pool:
        pool.load(data, RATE)
        (parents,) = running(pool)
        pool._processes[0]._owner -= 1  # as a fork finds it
        assert len(pool.load(data, RATE)) == RATE
        assert running(pool)[0].pid != parents.pid
        assert parents.poll() is None
        parents.kill()


def test_closing_a_reader_gives_up_its_files_and_no_others(long_file):
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    with AudioPool(1) as pool, ThreadPoolExecutor(2) as threads:
        given_up, other = pool.reader(2), pool.reader(2)
        futures = [threads.submit(attempt, given_up.load, long_file)]
        while not running(pool):
            time.sleep(0.01)
        futures.append(threads.submit(attempt, given_up.load, data))
        given_up.close()
        assert all("was not read" in future.result() for future in futures)
        assert len(other.load(data, RATE)) == RATE
        assert attempt(given_up.load, data).endswith("was not read, since the call was given up")


def test_a_single_file_starts_no_process_but_takes_one_that_runs():
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    with AudioPool() as pool:
        assert len(pool.reader(1).load(data, RATE)) == RATE
        assert running(pool) == []
        pool.load(data, RATE)
        assert not pool.reader(1)._is_in_thread


def test_processes_end_when_nobody_has_the_pool():
    pool = AudioPool(1)
    pool.load(encode(chirp(RATE, 1.0), RATE, "flac", "flac"), RATE)
    (process,) = running(pool)
    del pool
    gc.collect()
    assert process.poll() is not None


_LEFT_OPEN = """
import sys
from core_runner.audio import AudioPool
pool = AudioPool(1)
pool.load(sys.stdin.buffer.read(), 16000)
print(pool._processes[0]._process.pid, flush=True)
if sys.argv[1] == "killed":
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("ending", ["at its end", "killed"])
def test_processes_end_with_the_one_that_has_them(ending):
    """An idle one keeps nobody from exiting, and does not outlive who started it."""
    data = encode(chirp(RATE, 1.0), RATE, "flac", "flac")
    command = [sys.executable, "-c", _LEFT_OPEN, ending]
    ended = subprocess.run(command, input=data, capture_output=True, timeout=60)
    assert ended.stderr == b""
    deadline = time.monotonic() + 30
    while is_alive(int(ended.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(ended.stdout))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Nobody may have asked for its exit status yet.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


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
