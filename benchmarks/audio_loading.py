"""Seconds of audio decoded a second, by format, and how much of its speed another Python thread keeps meanwhile.

    python benchmarks/audio_loading.py --minutes 10 --files 64

Files are made with PyAV's encoders; each is read several times, so it comes out of the page cache. Needs the extra
`audio`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import numpy as np

from core_runner.audio import AudioPool, load_audio

RATE = 16_000
# File name -> (codec, rate, layout).
FORMATS = {
    "16 kHz.wav": ("pcm_s16le", 16_000, "mono"),
    "44.1 kHz.wav": ("pcm_s16le", 44_100, "stereo"),
    "44.1 kHz.flac": ("flac", 44_100, "stereo"),
    "44.1 kHz.mp3": ("libmp3lame", 44_100, "stereo"),
    "48 kHz.m4a": ("aac", 48_000, "stereo"),
    "48 kHz.opus": ("libopus", 48_000, "mono"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="length of a file")
    parser.add_argument("--files", type=int, default=64, help="files that are decoded at once")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads that ask for them")
    options = parser.parse_args(argv)
    print(f"av {av.__version__}, {os.cpu_count()} cores, {options.files} files of {options.minutes} minutes")
    print(
        f"{'':<14} {'one alone':>10} {'all':>10} {'beside':>8}   (times real time; share of a thread's speed)"
    )
    idle = _steps_a_second(threading.Event(), 1.0)
    with tempfile.TemporaryDirectory() as folder:
        for name, (codec, rate, layout) in FORMATS.items():
            path = Path(folder, name)
            _write(path, codec, rate, layout, 60 * options.minutes)
            started = time.perf_counter()
            seconds = len(load_audio(path, RATE)) / RATE
            alone = seconds / (time.perf_counter() - started)
            together, beside = _all_at_once(path, options.files, options.threads)
            print(f"{name:<14} {alone:>10.0f} {together * seconds:>10.0f} {beside / idle:>8.2f}", flush=True)


def _all_at_once(path: Path, num_files: int, num_threads: int) -> tuple[float, float]:
    """Files a second, once the processes run, and steps a second of this thread meanwhile."""
    done = threading.Event()
    with AudioPool() as pool, ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda _: pool.load(path, RATE).size, range(num_threads)))  # they start here
        started = time.perf_counter()
        futures = [threads.submit(lambda: pool.load(path, RATE).size) for _ in range(num_files)]
        threads.submit(done.set)  # begins when the last file has
        steps = _steps_a_second(done, 600.0)
        for future in futures:
            future.result()
        return num_files / (time.perf_counter() - started), steps


def _steps_a_second(done: threading.Event, most_s: float) -> float:
    """Rate of a loop that holds the interpreter lock as an engine's thread does: all of the time but for waits."""
    started, steps = time.perf_counter(), 0
    while not done.is_set() and time.perf_counter() - started < most_s:
        sum(range(200))
        steps += 1
    return steps / (time.perf_counter() - started)


def _write(path: Path, codec: str, rate: int, layout: str, seconds: float) -> None:
    random = np.random.default_rng(0)
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        kind = stream.codec_context.format.name
        resampler = av.AudioResampler(kind, layout, rate, frame_size=stream.codec_context.frame_size or 1024)
        for second in range(int(seconds)):
            times = np.arange(rate) / rate + second
            voice = 0.3 * np.sin(2 * np.pi * 180 * times) * (1 + np.sin(2 * np.pi * 3 * times))
            samples = (voice + 0.02 * random.standard_normal(rate)).astype(np.float32)
            samples = np.tile(samples, (len(av.AudioLayout(layout).channels), 1))
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, second * rate
            for made in resampler.resample(frame):
                output.mux(stream.encode(made))
        for made in resampler.resample(None):
            output.mux(stream.encode(made))
        output.mux(stream.encode(None))


if __name__ == "__main__":
    main()
