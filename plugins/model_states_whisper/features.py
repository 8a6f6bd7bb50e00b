"""Log-mel features, as transformers' extractor makes them, but on the device and for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from model_states import CheckpointConfig, CheckpointError
from model_states.loading.hub import find_file, read_json


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

    def __call__(self, audio: torch.Tensor) -> torch.Tensor:
        """Features [n, feature_size, num_frames] of audio float32 [n, num_samples], padded with zeros (silence)."""
        config = self.config
        spectrum = torch.stft(
            audio, config.n_fft, config.hop_length, window=self._window, return_complex=True
        )
        power = spectrum[..., :-1].abs().square()
        log_mel = (self._filters @ power).clamp(min=1e-10).log10()
        loudest = log_mel.amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(log_mel, loudest - 8.0) + 4.0) / 4.0
