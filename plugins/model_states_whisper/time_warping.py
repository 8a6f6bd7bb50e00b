"""When each token is spoken, out of how strongly it attends to each position of the audio.

Attention heads that follow the audio while the text is written look like a staircase over (tokens, positions). They are
made comparable and smoothed, and the path through the staircase that sees the most attention gives every token its
positions, by dynamic time warping (Sakoe and Chiba 1978). The treatment of the heads is that of the reference
implementation of Radford et al. 2022 (whisper/timing.py).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

MEDIAN_WIDTH: Final = 7
# A network of exchanges that leaves the median of seven in the middle: (lower, upper) places, in order.
_EXCHANGES: Final = (
    *((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)),
    *((2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)),
)


def sharpen(weights: torch.Tensor) -> torch.Tensor:
    """Mean over heads of normalised, smoothed attention [heads, tokens, positions], float32 [tokens, positions].

    Each position's weights get mean 0 and deviation 1 over the tokens, or zeros where they are all the same; then each
    is replaced by the median of the seven positions around it, reflected at the ends.
    """
    weights = weights.float()
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    normal = (weights - mean) / torch.where(deviation > 0, deviation, 1.0)
    return median_filter(normal).mean(0)


def median_filter(x: torch.Tensor) -> torch.Tensor:
    """Median of each value and the three at either side along the last axis; shorter than four, as it is."""
    side = MEDIAN_WIDTH // 2
    if x.shape[-1] <= side:
        return x
    length = x.shape[-1]
    padded = functional.pad(x, (side, side), mode="reflect")
    places = [padded[..., place : place + length] for place in range(MEDIAN_WIDTH)]
    for low, high in _EXCHANGES:
        places[low], places[high] = (
            torch.minimum(places[low], places[high]),
            torch.maximum(places[low], places[high]),
        )
    return places[side]


def warp(gain: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """First position of each token, [tokens], on the path of the largest sum through gain [tokens, positions].

    The path leads from the first token at the first position to the last at the last; a step goes on by a token, a
    position, or both. Never decreases; the first is 0.
    """
    cost = -gain.astype(np.float64)
    total = np.empty_like(cost)
    total[0] = np.cumsum(cost[0])
    for token in range(1, len(cost)):
        # The cheapest way in from the token before, then along this token: total[p] = min(enter[q] + sum(cost[q..p])).
        enter = total[token - 1].copy()
        np.minimum(enter[1:], total[token - 1, :-1], out=enter[1:])
        along = np.cumsum(cost[token])
        total[token] = along + np.minimum.accumulate(enter - along + cost[token])
    return _trace(total)


def _trace(total: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """First positions on the cheapest path, from its end back to its start."""
    token, position = total.shape[0] - 1, total.shape[1] - 1
    first = np.zeros(total.shape[0], np.int64)
    while token > 0:
        above = total[token - 1, position]
        if position == 0:
            first[token], token = position, token - 1
            continue
        before, both = total[token, position - 1], total[token - 1, position - 1]
        if both < above and both < before:
            first[token], token, position = position, token - 1, position - 1
        elif above < both and above < before:
            first[token], token = position, token - 1
        else:
            position -= 1
    return first
