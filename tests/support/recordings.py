"""Small recordings in every format, made with PyAV's encoders, and the samples that they should give."""

from __future__ import annotations

import io
import struct
from fractions import Fraction

import av
import numpy as np

RATE = 16_000  # what models want


def chirp(rate: int, seconds: float, channels: int = 1) -> np.ndarray:
    """Float32 [channels, n]: a tone that rises from 200 to 1,200 Hz, so that shifts in time show."""
    time = np.arange(round(rate * seconds)) / rate
    tone = 0.4 * np.sin(2 * np.pi * (200 * time + 500 * time**2 / seconds))
    return np.tile(tone.astype(np.float32), (channels, 1))


def tone(rate: int, seconds: float, hertz: float) -> np.ndarray:
    """Float32 [n], of amplitude 0.5."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def encode(
    samples: np.ndarray,
    rate: int,
    container: str,
    codec: str,
    *,
    layout: str | None = None,
    pieces: tuple[tuple[float, slice], ...] = (),
    with_video: bool = False,
    options: dict[str, str] | None = None,
) -> bytes:
    """A file of samples [channels, n]. pieces: (time in seconds, which samples), by default all of them at 0."""
    file = io.BytesIO()
    layout = layout or {1: "mono", 2: "stereo"}[len(samples)]
    with av.open(file, "w", format=container) as output:
        video = output.add_stream("mpeg4", rate=10) if with_video else None
        stream = output.add_stream(codec, rate=rate, layout=layout, options=options or {})
        if video is not None:
            video.width = video.height = 32
            for number in range(20):
                picture = av.VideoFrame(32, 32, "yuv420p")
                for plane in picture.planes:
                    plane.update(bytes(plane.buffer_size))
                picture.pts, picture.time_base = number, Fraction(1, 10)
                output.mux(video.encode(picture))
            output.mux(video.encode(None))
        for start_s, piece in pieces or ((0.0, slice(None)),):
            _encode_piece(output, stream, samples[:, piece], rate, layout, start_s)
        output.mux(stream.encode(None))
    return file.getvalue()


def _encode_piece(output, stream, samples, rate, layout, start_s):
    # Some encoders take frames of one size only.
    resampler = av.AudioResampler(
        stream.codec_context.format.name, layout, rate, frame_size=stream.codec_context.frame_size or 1024
    )
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, round(start_s * rate), Fraction(1, rate)
    for made in (*resampler.resample(frame), *resampler.resample(None)):
        output.mux(stream.encode(made))


def wav(samples: np.ndarray, rate: int, kind: str, *, extensible: bool = False) -> bytes:
    """A WAV file of samples [channels, n]; kind: "u1", "i2", "i3", "i4", "f4" or "f8"."""
    channels, width = len(samples), int(kind[1])
    flat = np.clip(samples.T.reshape(-1).astype(np.float64), -1, 1)
    if kind[0] == "f":
        data = flat.astype(f"<{kind}").tobytes()
    elif kind == "u1":
        data = np.round(flat * 127 + 128).astype(np.uint8).tobytes()
    else:
        whole = np.round(flat * (2 ** (8 * width - 1) - 1)).astype("<i8")
        data = np.ascontiguousarray(whole[:, None].view(np.uint8).reshape(-1, 8)[:, :width]).tobytes()
    tag = 3 if kind[0] == "f" else 1
    frame = channels * width
    form = struct.pack(
        "<HHIIHH", 0xFFFE if extensible else tag, channels, rate, rate * frame, frame, 8 * width
    )
    if extensible:
        form += struct.pack("<HHIH14s", 22, 8 * width, 0, tag, bytes(14))
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"note\3\0\0\0abc\0"
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def shift_and_likeness(samples: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Seconds by which samples [n] lag behind `expected`, at most 0.1, and their correlation at that lag."""
    size = min(len(samples), len(expected))
    samples, expected = samples[:size], expected[:size]
    edge = RATE // 10
    lags = range(-edge, edge + 1)
    inner = expected[edge : size - edge]
    found = [float(samples[edge + lag : size - edge + lag] @ inner) for lag in lags]
    best = int(np.argmax(found))
    part = samples[best : best + len(inner)]
    return lags[best] / RATE, found[best] / float(np.linalg.norm(part) * np.linalg.norm(inner))
