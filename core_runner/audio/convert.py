"""Decoded frames of any kind to mono samples at one rate, with FFmpeg's mixer, and its resampler for odd rates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from core_runner.audio.buffer import SampleBuffer
from core_runner.audio.resample import Resampler, can_resample
from core_runner.errors import AudioError

# A longer filter than FFmpeg's default, which lets tones 5 % above half the rate through at -22 dB. This one is flat to
# 0.94 of half the lower rate, and has lost 60 dB at 1.02 of it (tests/audio/test_resampling.py). The last option keeps
# mixed channels from overflowing.
_RESAMPLER: Final = "filter_size=128:cutoff=0.98:rematrix_maxval=1"
# Samples a second of recordings; a damaged header may say anything, and FFmpeg would make a filter for it.
_RATES: Final = range(1000, 1_000_001)
_FRAMES_PER_PULL: Final = 64
_SAMPLES_PER_FRAME: Final = 1 << 16


class Converter:
    """Takes frames that follow one another, and appends what comes of them to a buffer.

    Channels are mixed as players do, by what each is for and without overflow: (left + right) / 2 for stereo.
    """

    def __init__(self, buffer: SampleBuffer) -> None:
        self._buffer = buffer
        self._graph: Any = None
        self._resampler: Resampler | None = None
        self._kind: tuple[Any, ...] = ()
        self._num_waiting = 0

    def feed(self, frame: Any) -> None:
        """Take one frame; its rate, channels and sample format may differ from those of the one before."""
        kind = (frame.sample_rate, frame.format.name, frame.layout.name)
        if kind != self._kind:
            self._begin(kind)
        frame.pts = None  # gaps are filled already
        self._graph.push(frame)
        self._num_waiting += 1
        if self._num_waiting == _FRAMES_PER_PULL:
            self._pull()

    def feed_samples(self, samples: npt.NDArray[np.floating], rate: int) -> None:
        """Take samples [n], mono, at `rate` a second."""
        import av

        self._check_rate(rate)
        block = np.ascontiguousarray(samples, dtype=np.float32)[None]
        frame = av.AudioFrame.from_ndarray(block, format="flt", layout="mono")
        frame.sample_rate = rate
        self.feed(frame)

    def flush(self) -> None:
        """Have everything that was fed in the buffer."""
        if self._graph is not None:
            self._graph.push(None)
            self._pull()
        if self._resampler is not None:
            self._resampler.flush()
        self._graph, self._resampler, self._kind = None, None, ()

    def _begin(self, kind: tuple[Any, ...]) -> None:
        rate, wanted = kind[0], self._buffer.sampling_rate
        self._check_rate(rate)
        self.flush()
        if rate != wanted and can_resample(rate, wanted):
            self._resampler, wanted = Resampler(self._buffer, rate), rate
        self._graph, self._kind = _make_graph(kind, wanted), kind

    def _check_rate(self, rate: int) -> None:
        if rate not in _RATES:
            raise AudioError(
                f"{self._buffer.name}: {rate} samples a second are no recording's; its header is damaged"
            )

    def _pull(self) -> None:
        self._num_waiting = 0
        take = self._buffer.append if self._resampler is None else self._resampler.feed
        while True:
            try:
                frame = self._graph.pull()
            except (BlockingIOError, EOFError):  # more has to be fed first, or this was the end
                return
            take(frame.to_ndarray()[0])


def _make_graph(kind: tuple[Any, ...], sampling_rate: int) -> Any:
    import av

    rate, sample_format, layout = kind
    graph = av.filter.Graph()
    if hasattr(graph, "threads"):
        # Or it starts one for each core, for every file.
        graph.threads = 1
    filters = (
        graph.add(
            "abuffer",
            sample_rate=str(rate),
            sample_fmt=sample_format,
            channel_layout=layout,
            time_base=f"1/{rate}",
        ),
        graph.add("aresample", f"{sampling_rate}:{_RESAMPLER}"),
        graph.add("aformat", sample_fmts="flt", channel_layouts="mono", sample_rates=str(sampling_rate)),
        # Fewer and larger frames, for each one costs Python's time.
        graph.add("asetnsamples", f"{_SAMPLES_PER_FRAME}:p=0"),
        graph.add("abuffersink"),
    )
    for before, after in pairwise(filters):
        before.link_to(after)
    graph.configure()
    return graph
