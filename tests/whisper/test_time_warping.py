"""Attention to times: the steps of the published algorithm, each beside transformers' own."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from model_states_whisper.time_warping import median_filter, sharpen, warp


def test_median_of_any_order() -> None:
    rows = torch.tensor([*product((0.0, 1.0), repeat=7)])
    # A network that sorts zeros and ones sorts anything.
    assert torch.equal(median_filter(rows)[:, 3], rows.median(dim=1).values)


@pytest.mark.parametrize("shape", [(3, 7, 30), (2, 1, 9), (1, 4, 4), (2, 3, 8), (1, 2, 3), (1, 2, 1)])
def test_median_filter_equals_transformers(shape: tuple[int, ...]) -> None:
    from transformers.models.whisper.generation_whisper import _median_filter

    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))
    assert torch.equal(median_filter(x), _median_filter(x[None], 7)[0])


@pytest.mark.parametrize("seed", range(40))
def test_path_equals_transformers(seed: int) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    rng = np.random.default_rng(seed)
    gain = rng.standard_normal((rng.integers(1, 25), rng.integers(1, 90)))
    tokens, positions = _dynamic_time_warping(-gain)
    starts = positions[np.diff(tokens, prepend=-1) > 0]
    assert warp(gain).tolist() == starts.tolist()


def test_path_follows_a_staircase() -> None:
    lengths = [3, 1, 12, 5, 1, 8]
    gain = np.full((len(lengths), sum(lengths)), -1.0, np.float32)
    starts = np.cumsum([0, *lengths[:-1]])
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        gain[row, start : start + length] = 1.0
    assert warp(gain).tolist() == starts.tolist()


def test_more_tokens_than_positions() -> None:
    starts = warp(np.random.default_rng(0).standard_normal((9, 4)))
    assert starts[0] == 0
    assert starts[-1] <= 3
    assert np.all(np.diff(starts) >= 0)


def test_position_that_all_tokens_see_alike_says_nothing() -> None:
    weights = torch.rand(2, 5, 20, generator=torch.Generator().manual_seed(0))
    weights[:, :, 4] = 0.0
    weights[:, :, 9] = 0.25
    sharp = sharpen(weights)
    assert sharp.shape == (5, 20)
    assert sharp.isfinite().all()
