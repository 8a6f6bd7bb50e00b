"""Log-mel features, as transformers' extractor makes them, but on the device and for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from model_states import CheckpointConfig, CheckpointError
from model_states.loading.hub import find_file, read_json
from model_states.staged_rows import host_array


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureConfig:
    """Sizes of the extractor: mel bands, frames of an encoder input, samples a second, between frames, of an FFT."""

    feature_size: int
    num_frames: int
    sampling_rate: int = 16000
    hop_length: int = 160
    n_fft: int = 400

    @property
    def num_samples(self) -> int:
        """Samples of one encoder input."""
        return self.num_frames * self.hop_length


def load_feature_config(checkpoint: CheckpointConfig) -> FeatureConfig:
    """What the model takes, and what processor_config.json or preprocessor_config.json says of how it is made.

    Raises `CheckpointError` where the two do not fit.
    """
    model: Any = checkpoint.hf_config
    raw = _read(checkpoint.model)
    given = {name: int(raw[name]) for name in ("sampling_rate", "hop_length", "n_fft") if name in raw}
    config = FeatureConfig(
        feature_size=model.num_mel_bins, num_frames=2 * model.max_source_positions, **given
    )
    bands = raw.get("feature_size", config.feature_size)
    num_samples = raw.get("chunk_length", 0) * config.sampling_rate or config.num_samples
    if (bands, num_samples) != (config.feature_size, config.num_samples):
        raise CheckpointError(
            f"model {checkpoint.model!r}: the processor makes features of {bands} bands and {num_samples} samples, and "
            f"the model takes {config.feature_size} and {config.num_samples}; one of the files is another model's"
        )
    return config


def _read(model: str) -> Mapping[str, Any]:
    path = find_file(model, "processor_config.json")
    nested = read_json(path).get("feature_extractor") if path else None
    if isinstance(nested, Mapping):
        return nested
    path = find_file(model, "preprocessor_config.json")
    return read_json(path) if path else {}


_PIECE_FRAMES: Final = 30_000  # of a recording, 5 minutes


class LogMel:
    """Features of audio at `sampling_rate`, float32."""

    def __init__(self, config: FeatureConfig, device: torch.device) -> None:
        from transformers.audio_utils import mel_filter_bank

        self.config = config
        self._window = torch.hann_window(config.n_fft, device=device)
        bank = mel_filter_bank(
            num_frequency_bins=1 + config.n_fft // 2,
            num_mel_filters=config.feature_size,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=config.sampling_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        self._filters = torch.from_numpy(bank.T.copy()).to(device, torch.float32)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def __call__(self, audio: torch.Tensor) -> torch.Tensor:
        """Features [n, feature_size, num_frames] of audio float32 [n, num_samples], padded with zeros (silence)."""
        log_mel = self._log_mel(audio, center=True)[..., :-1]
        loudest = log_mel.amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(log_mel, loudest - 8.0) + 4.0) / 4.0

    @torch.inference_mode()
    def of_recording(self, audio: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Features [feature_size, n // hop_length] of a whole recording float32 [n], which is normalised as one.

        As transformers' extractor without truncation and padding, but computed in pieces, so that the device holds
        little of it at a time. The host waits for them, from any thread, and not for what else the device does.
        """
        config = self.config
        if len(audio) < config.n_fft:  # less than the context of a frame
            audio = np.pad(audio, (0, config.n_fft - len(audio)))
        num_frames = len(audio) // config.hop_length
        out = host_array((config.feature_size, num_frames), self._window.device)
        with torch.cuda.stream(self._stream):  # None is the current one
            for first in range(0, num_frames, _PIECE_FRAMES):
                last = min(first + _PIECE_FRAMES, num_frames)
                samples = torch.from_numpy(self._context(audio, first, last)).to(self._window.device)
                out[:, first:last] = self._log_mel(samples, center=False).cpu().numpy()
        np.maximum(out, out.max() - 8.0, out=out)
        out += 4.0
        out /= 4.0
        return out

    def _context(self, audio: npt.NDArray[np.float32], first: int, last: int) -> npt.NDArray[np.float32]:
        """The samples that frames [first, last) look at; past an end of the recording it is mirrored."""
        config, half = self.config, self.config.n_fft // 2
        start, stop = first * config.hop_length - half, (last - 1) * config.hop_length + half
        missing = max(-start, 0), max(stop - len(audio), 0)
        return np.pad(audio[max(start, 0) : stop], missing, mode="reflect")

    def _log_mel(self, audio: torch.Tensor, *, center: bool) -> torch.Tensor:
        config = self.config
        spectrum = torch.stft(
            audio, config.n_fft, config.hop_length, window=self._window, center=center, return_complex=True
        )
        return (self._filters @ spectrum.abs().square()).clamp(min=1e-10).log10()
