"""What the sampler's kernels read for each row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The slot and token of each logits row, and the parameters of each slot. Every tensor is on the device.

    Kernels look a row's parameters up as `temperature[slots[row]]`, so nothing is gathered per step.
    """

    slots: torch.Tensor  # logits row -> slot, int32 [num_logits]
    logits_indices: torch.Tensor  # logits row -> token of the step, int64 [num_logits]
    positions: torch.Tensor  # position of each token, int64 [num_tokens]
    temperature: torch.Tensor  # float32 [R + 1], 0 is greedy
    top_k: torch.Tensor  # int32 [R + 1], 0 keeps all
    top_p: torch.Tensor  # float32 [R + 1], 1 keeps all
    min_p: torch.Tensor  # float32 [R + 1], 0 keeps all
    seed: torch.Tensor  # int64 [R + 1]

    def sampled_positions(self) -> torch.Tensor:
        """Position that the id sampled for each row will have, int64 [num_logits]."""
        return self.positions[self.logits_indices] + 1
