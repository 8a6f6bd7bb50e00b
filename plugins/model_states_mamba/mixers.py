"""Mixers that keep their state in pools: each takes the place of a transformers module and shares its weights.

What they compute is transformers' full recomputation of a sequence. Its one-token cached step differs in places (it
does not clamp time steps that a finite `time_step_limit` clamps elsewhere); that is not copied.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from model_states import CacheTensor, ModelConfig
from model_states.components.recurrent_state import state_dtype
from model_states.kernels.add_norm import RowRoot
from model_states.kernels.rope_write import Rotary
from model_states.rewrites.mixer import Mixer, check_silu
from model_states.rewrites.products import Projection, Rows, Unnormed
from model_states_mamba.kernels.gated_norm import GatedNorm, gated_norm
from model_states_mamba.kernels.selective_scan import SelectiveInputs, SelectiveWeights, selective_scan
from model_states_mamba.kernels.ssd_scan import Gated, SsdWeights, num_pieces, ssd_scan


class ScanMixer(Mixer):
    """A mixer whose convolution leads into a scan with a state of its own."""

    def __init__(self, original: Any) -> None:
        check_silu(original)
        super().__init__(
            original.conv1d,
            _projection(original.in_proj),
            _projection(original.out_proj),
            getattr(original, "ssm_in_multiplier", None),
        )

    def state_tensors(self, config: ModelConfig) -> dict[str, CacheTensor]:
        """The inputs that the convolution keeps, and the state of the scan."""
        return {**super().state_tensors(config), "ssm": CacheTensor(self._ssm_shape(), state_dtype(config))}

    @abstractmethod
    def _ssm_shape(self) -> tuple[int, ...]:
        """Shape of one request's state behind the convolution."""


def _projection(module: Any) -> Projection:
    return Projection(module.weight, module.bias)


class HeadMixer(ScanMixer):
    """Mamba-2: one decay for each head. The family differs in multipliers, in the norm and in the clamp of dt."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.num_heads, self.head_size = int(original.num_heads), int(original.head_dim)
        self.num_groups, self.state_size = int(original.n_groups), int(original.ssm_state_size)
        self.size = self.num_heads * self.head_size
        self.norm = _gated_norm(original.norm) if _has_norm(original) else None
        low, high = (float(limit) for limit in original.time_step_limit)
        self.weights = SsdWeights(
            -original.A_log.float().exp(), original.D.float(), original.dt_bias.float(), (low, high)
        )
        multipliers = getattr(original, "mup_vector", None)
        self.multipliers = None if multipliers is None else multipliers.flatten()

    def _ssm_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_size, self.state_size

    def attend(self, qkv: torch.Tensor, rotary: Rotary | None) -> Rows:
        """Convolution, scan, and norm or gate."""
        projected = qkv if self.multipliers is None else qkv * self.multipliers
        by_group = self.num_groups * self.state_size
        gate, mixed, dt = projected.split([self.size, self.size + 2 * by_group, self.num_heads], -1)
        x, b, c = self._convolve(mixed, silu=True).split([self.size, by_group, by_group], -1)
        y = x.new_empty(len(x), self.num_heads, self.head_size)
        after = self._after(gate)
        ssd_scan(
            x.unflatten(1, (self.num_heads, self.head_size)),
            dt,
            b.unflatten(1, (self.num_groups, self.state_size)),
            c.unflatten(1, (self.num_groups, self.state_size)),
            self.weights,
            self.layer.tensors["ssm"],
            self.layer.step,
            y,
            after,
        )
        flat: torch.Tensor = y.flatten(1)
        if self.norm is not None and after is None:
            gated_norm(flat, gate, self.norm, flat)
        if self.norm is None or after is None or after.squares is None:
            return flat
        return Unnormed(flat, RowRoot(after.squares.flatten(1), self.size, self.norm.eps))

    def _after(self, gate: torch.Tensor) -> Gated | None:
        """Gate and norm as far as the scan does them in passing; None leaves them to a kernel of their own."""
        norm = self.norm
        if norm is None:
            return Gated(gate, None, False, None)
        # A root for each group is no root of the row, and float16 may not hold what is not divided yet.
        if norm.group_size != self.size or self.out.bias is not None or gate.dtype == torch.float16:
            return None
        pieces = num_pieces(self.head_size)
        squares = gate.new_empty(len(gate), self.num_heads, pieces, dtype=torch.float32)
        return Gated(gate, norm.weight, norm.gate_last, squares)


def _has_norm(original: Any) -> bool:
    return bool(getattr(original, "mamba_rms_norm", True))


def _gated_norm(norm: Any) -> GatedNorm:
    # What the module says itself: releases of transformers differ in whether they norm by group.
    size = norm.weight.numel()
    group_size = getattr(norm, "group_size", size // getattr(norm, "n_groups", 1))
    return GatedNorm(
        norm.weight, float(norm.variance_epsilon), group_size, getattr(norm, "norm_before_gate", False)
    )


class ChannelMixer(ScanMixer):
    """Mamba-1: a decay for every channel and state. Some models norm dt, b and c."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.x_proj, self.dt_proj = _projection(original.x_proj), Projection(original.dt_proj.weight, None)
        self.rank, self.state_size = int(original.time_step_rank), int(original.ssm_state_size)
        self.norms = [getattr(original, f"{name}_layernorm", None) for name in ("dt", "b", "c")]
        self.weights = SelectiveWeights(
            -original.A_log.float().exp(), original.D.float(), original.dt_proj.bias.float()
        )

    def _ssm_shape(self) -> tuple[int, ...]:
        return len(self.conv_weight), self.state_size

    def attend(self, qkv: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Convolution and gated scan."""
        mixed, gate = qkv.chunk(2, -1)
        x = self._convolve(mixed, silu=True)
        parts = self.x_proj(x).split([self.rank, self.state_size, self.state_size], -1)
        dt, b, c = (
            part if norm is None else norm(part) for norm, part in zip(self.norms, parts, strict=True)
        )
        inputs = SelectiveInputs(x, self.dt_proj(dt), gate, b, c)
        y = torch.empty_like(x)
        selective_scan(inputs, self.weights, self.layer.tensors["ssm"], self.layer.step, y)
        return y


# transformers' mixers -> what takes their place.
MIXERS: dict[str, type[ScanMixer]] = {
    "MambaMixer": ChannelMixer,
    "FalconMambaMixer": ChannelMixer,
    "JambaMambaMixer": ChannelMixer,
    "Mamba2Mixer": HeadMixer,
    "BambaMixer": HeadMixer,
    "GraniteMoeHybridMambaLayer": HeadMixer,
    "NemotronHMamba2Mixer": HeadMixer,
    "FalconH1Mixer": HeadMixer,
    "Zamba2MambaMixer": HeadMixer,
}
