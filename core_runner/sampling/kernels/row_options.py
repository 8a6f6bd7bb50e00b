"""The options of a row, as the sampler's kernels read them: by the row's slot, so that nothing is gathered per step."""

from __future__ import annotations

from typing import Any

from core_runner.sampling.rows import SamplingRows
from model_states.kernels.triton_import import tl, triton


def rows_argument(rows: SamplingRows) -> tuple[Any, ...]:
    """What the functions below take apart again."""
    options = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    stride = rows.temperature.stride(0)
    assert all(option.stride(0) == stride for option in options)
    where = (rows.slots, rows.logits_indices, rows.positions)
    return (*where, *options, stride, rows.seed, rows.seed.stride(0))


@triton.jit
def load_temperature(rows, row) -> Any:
    """Temperature of a row."""
    slots, _, _, temperatures, _, _, _, stride, _, _ = rows
    return tl.load(temperatures + tl.load(slots + row).to(tl.int64) * stride)


@triton.jit
def load_filters(rows, row) -> Any:
    """Top-k, top-p and min-p of a row; what is not used is not read."""
    slots, _, _, _, top_ks, top_ps, min_ps, stride, _, _ = rows
    at = tl.load(slots + row).to(tl.int64) * stride
    return tl.load(top_ks + at), tl.load(top_ps + at), tl.load(min_ps + at)


@triton.jit
def load_noise_key(rows, row) -> Any:
    """A row's seed and the position that its sampled id will have."""
    slots, logits_indices, positions, _, _, _, _, _, seeds, stride = rows
    seed = tl.load(seeds + tl.load(slots + row).to(tl.int64) * stride)
    return seed, tl.load(positions + tl.load(logits_indices + row)) + 1


@triton.jit
def is_top_p_alone(temperature, top_k, top_p, vocab_size) -> Any:
    """Whether top-p filters a row's ids and top-k does not."""
    return (temperature > 0) & (top_p < 1) & ((top_k <= 0) | (top_k >= vocab_size))
