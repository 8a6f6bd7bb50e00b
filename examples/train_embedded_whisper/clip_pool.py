"""Clips in the device's memory, at the model's sampling rate; the newest chunk takes the place of the oldest."""

import torch
from clips import CHUNK_TICKS, MAX_CLIPS, MAX_TOKENS, Chunk
from voices import TICK

TICK_SAMPLES = 320  # samples in 20 ms at 16 kHz
CHUNK_BYTES = CHUNK_TICKS * TICK_SAMPLES * 2


def resample(audio: torch.Tensor) -> torch.Tensor:
    """int16 [n * 441] at 22,050 Hz to int16 [n * 320] at 16,000 Hz, by leaving out the upper part of the spectrum."""
    num_samples = len(audio) // TICK * TICK_SAMPLES
    spectrum = torch.fft.rfft(audio.float())[: num_samples // 2 + 1]
    resampled = torch.fft.irfft(spectrum, num_samples) * (TICK_SAMPLES / TICK)
    return resampled.round().clamp(-32768, 32767).to(torch.int16)


def move(chunk: Chunk, device: torch.device) -> Chunk:
    """The chunk's arrays as tensors on a device."""
    arrays = (torch.from_numpy(array).to(device) for array in chunk[:-1])
    return Chunk(*arrays, num_clips=chunk.num_clips)


class ClipPool:
    """Rows of audio [*, 320] by tick, and of each clip its place, length and tokens (see `Chunk`).

    The row after the last is silence, for ticks in which nobody speaks.
    """

    def __init__(self, num_chunks: int, device: torch.device) -> None:
        def table(*shape: int) -> torch.Tensor:
            return torch.zeros(num_chunks, MAX_CLIPS, *shape, dtype=torch.int32, device=device)

        num_ticks = num_chunks * CHUNK_TICKS
        self.audio = torch.zeros(num_ticks + 1, TICK_SAMPLES, dtype=torch.int16, device=device)
        self.frame_tokens = torch.zeros(num_ticks + 1, dtype=torch.int16, device=device)
        self.silence, self.device = num_ticks, device
        self.starts, self.ticks, self.counts = table(), table(), table()
        self.tokens, self.spans = table(MAX_TOKENS), table(MAX_TOKENS, 2)
        self.num_clips = torch.zeros(num_chunks, dtype=torch.int32, device=device)
        self.num_added = 0

    @property
    def num_filled(self) -> int:
        """Chunks that are in the pool."""
        return min(self.num_added, len(self.num_clips))

    def add(self, chunk: Chunk) -> None:
        """Take in a chunk that is on the device, in place of the oldest if the pool is full."""
        slot = self.num_added % len(self.num_clips)
        ticks = slice(slot * CHUNK_TICKS, (slot + 1) * CHUNK_TICKS)
        self.audio[ticks] = resample(chunk.audio).view(-1, TICK_SAMPLES)
        self.frame_tokens[ticks] = chunk.frame_tokens
        for name in ("ticks", "counts", "tokens", "spans"):
            getattr(self, name)[slot] = getattr(chunk, name)
        self.starts[slot] = chunk.starts + slot * CHUNK_TICKS
        self.num_clips[slot] = chunk.num_clips
        self.num_added += 1

    def choose(self, rows: int, count: int) -> torch.Tensor:
        """Clips [rows, count]: in half of the rows neighbours, which mostly have one voice, else any."""

        def draw(count: int) -> torch.Tensor:
            return torch.rand(rows, count, device=self.device)

        slots = (draw(count) * self.num_filled).long()
        together = draw(1) < 0.5
        slots = torch.where(together, slots[:, :1], slots)
        num_clips = self.num_clips[slots]
        places = (draw(count) * num_clips).long()
        neighbours = (places[:, :1] + torch.arange(count, device=self.device)) % num_clips
        return slots * MAX_CLIPS + torch.where(together, neighbours, places)

    def of(self, name: str, clips: torch.Tensor) -> torch.Tensor:
        """A column of the clips' table: starts, ticks, counts, tokens or spans."""
        return getattr(self, name).flatten(0, 1)[clips]
