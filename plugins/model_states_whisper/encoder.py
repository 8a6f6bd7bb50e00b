"""The speech encoder as an `Encoder` of cross-attention: features or audio in, hidden states out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from model_states.components.content_key import content_key
from model_states.encoder_decoder import EncoderLayer, ShiftedNorm, stack_layers
from model_states.kernels.activate import activate
from model_states.staged_rows import RowsToDevice
from model_states_whisper.features import FeatureConfig, LogMel

Values = npt.NDArray[np.float32] | torch.Tensor
_HELP = (
    "give model_inputs={'input_features': log-mel features [bands, frames]} or {'audio': samples [n] at %d Hz}, "
    "and if wanted a 'key' that names their content"
)


class _Convolution:
    """A convolution over time as one product, in fp32 where its input is: on a GPU torch's own would round to less."""

    def __init__(self, module: nn.Conv1d) -> None:
        self._taps, self._stride = module.kernel_size[0], module.stride[0]
        self._padding = int(module.padding[0])
        self._weight = module.weight.transpose(1, 2).flatten(1)  # [out, taps * in]
        self._bias = module.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, frames, in] to [n, frames / stride, out]."""
        padded = functional.pad(x, (0, 0, self._padding, self._padding))
        windows = padded.unfold(1, self._taps, self._stride).transpose(2, 3)
        return functional.linear(windows.flatten(2), self._weight, self._bias)


class SpeechEncoder:
    """The encoder's layers behind the features. An input has one of

    input_features: float [feature_size, frames], at most `num_frames`; what is missing is zeros, as in transformers.
    audio: float [n], samples in [-1, 1] at `sampling_rate`, at most `num_samples`; what is missing is silence.

    as a numpy array or a tensor on any device, and may have a `key` (see `content_key`).
    """

    def __init__(
        self, module: Any, features: FeatureConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        """module: transformers' encoder, whose weights are shared."""
        self._convolutions = [_Convolution(module.conv1), _Convolution(module.conv2)]
        self._position_embedding = module.embed_positions.weight
        self._layers: list[EncoderLayer] = stack_layers(EncoderLayer, module.layers, True)
        self._norm = ShiftedNorm(module.layer_norm, self._layers[-1].shift_after)
        self.features, self.max_positions = features, features.num_frames // 2
        self._dtype, self._device = dtype, device
        self._log_mel = LogMel(features, device)
        self._transfer = RowsToDevice(device)

    def content_key(self, model_inputs: Mapping[str, Any]) -> bytes:
        """See `Encoder.content_key`."""
        name, values = self._read(model_inputs)
        key = model_inputs.get("key")  # whoever names content has looked at it
        if key is None and isinstance(values, np.ndarray) and not np.isfinite(values).all():
            raise ValueError(f"{name} holds values that are not finite; give numbers only")
        return content_key(values, key)

    def num_positions(self, model_inputs: Mapping[str, Any]) -> int:
        """Every output is as long as the longest."""
        return self.max_positions

    def largest_inputs(self) -> Mapping[str, Any]:
        """A whole window of audio, which takes the memory of the features too."""
        return {"audio": np.zeros(self.features.num_samples, np.float32)}

    def stage(self, inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """See `Encoder.stage`: features float32 [n, feature_size, num_frames]."""
        pairs = [self._read(item) for item in inputs]
        config = self.features
        spoken = [row for row, (name, _) in enumerate(pairs) if name == "audio"]
        if not spoken:
            return self._gather([values for _, values in pairs], config.feature_size, config.num_frames)
        features = self._log_mel(self._gather([pairs[row][1] for row in spoken], config.num_samples))
        if len(spoken) == len(pairs):
            return features
        batch = self._zeros(len(pairs), config.feature_size, config.num_frames)
        for row, own in zip(spoken, features, strict=True):
            batch[row] = own
        for row, (name, values) in enumerate(pairs):
            if name != "audio":
                self._write(values, batch[row])
        return batch

    @torch.inference_mode()
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, max_positions, hidden_size] of features [n, feature_size, num_frames]."""
        x = features.to(self._dtype).transpose(1, 2)
        for convolution in self._convolutions:
            x = activate(convolution(x), "gelu")
        x = (x + self._position_embedding).flatten(0, 1)
        for layer in self._layers:
            x = layer(x, len(features))
        return self._norm(x).view(len(features), self.max_positions, -1)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    def _gather(self, values: Sequence[Values], *shape: int) -> torch.Tensor:
        """float32 [n, *shape] on the device: each of the values at the start of the last axis, and zeros behind it."""
        arrays = [_padded(value, shape) for value in values if isinstance(value, np.ndarray)]
        if len(arrays) == len(values):
            out = torch.empty((len(values), *shape), dtype=torch.float32, device=self._device)
            self._transfer.copy_rows(arrays, out.flatten(1))
            return out
        out = self._zeros(len(values), *shape)
        for target, value in zip(out, values, strict=True):
            self._write(value, target)
        return out

    def _write(self, values: Values, target: torch.Tensor) -> None:
        """Copy values to the start of the target's last axis."""
        if isinstance(values, torch.Tensor):
            target[..., : values.shape[-1]] = values
        else:
            self._transfer.copy(_padded(values, target.shape), target.view(-1))

    def _read(self, model_inputs: Mapping[str, Any]) -> tuple[str, Values]:
        """Which of the two there is, and its values, checked; what the device holds is not read."""
        config = self.features
        names = set(model_inputs) - {"key"}
        if names not in ({"input_features"}, {"audio"}):
            given = ", ".join(map(repr, sorted(map(str, names)))) or "nothing"
            raise ValueError(f"model_inputs has {given}; {_HELP % config.sampling_rate}")
        (name,) = names
        values = _as_floats(name, model_inputs[name])
        shape = tuple(values.shape)
        most: tuple[int, ...]
        if name == "audio":
            fits, most = len(shape) == 1, (config.num_samples,)
        else:
            fits, most = (
                len(shape) == 2 and shape[0] == config.feature_size,
                (config.feature_size, config.num_frames),
            )
        if not fits or not 0 < shape[-1] <= most[-1]:
            raise ValueError(
                f"{name} has shape {list(shape)}, and this model takes up to {list(most)}; "
                "cut or transpose it"
            )
        return name, values


def _padded(values: npt.NDArray[np.float32], shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """The values, flattened, with zeros behind each row of features that is too short."""
    if values.ndim == 2 and values.shape[1] < shape[1]:
        values = np.pad(values, ((0, 0), (0, shape[1] - values.shape[1])))
    return np.ascontiguousarray(values).reshape(-1)


def _as_floats(name: str, values: Any) -> Values:
    """float32 on the host; as it is on a device."""
    if isinstance(values, torch.Tensor):
        if not values.is_floating_point():
            raise ValueError(f"{name} is of {values.dtype}; give floating-point numbers")
        if values.layout != torch.strided or values.is_meta:
            raise ValueError(
                f"{name} is a tensor of {values.layout} on {values.device}; give a dense one with data"
            )
        return values.detach().to(torch.float32).numpy() if values.device.type == "cpu" else values.detach()
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of unequal lengths
        raise ValueError(f"{name} is no array of numbers: {error}") from error
    if array.dtype.kind != "f":
        raise ValueError(f"{name} is of {array.dtype}; give floating-point numbers (integer samples / 32768)")
    return array.astype(np.float32, copy=False)
