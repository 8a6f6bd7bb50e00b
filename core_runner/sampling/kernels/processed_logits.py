"""The distribution that a row is sampled from, as logits: scaled by the temperature and filtered.

    best         = max over id of out[row, id]
    out[row, id] = (out[row, id] - best) / T   where out[row, id] >= thresholds[row], else -inf

for the rows whose slot wants the log-probabilities of that, in place; T is the row's temperature, or 1 where that is 0:
a greedy row has the distribution of its adjusted logits. The difference comes first, so that nothing overflows and no
two infinities meet.

out float32 [n, vocab_size], thresholds float32 [n] or None, temperature float32 [R + 1]; the rest in `OptionRows`.
"""

from __future__ import annotations

import torch

from core_runner.sampling.option_rows import AS_SAMPLED, PROCESSED, OptionRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 4096
_LEAST_TEMPERATURE = 1e-30  # its inverse is finite, and only the largest logits are left by then
_PROCESSED, _AS_SAMPLED = tl.constexpr(PROCESSED), tl.constexpr(AS_SAMPLED)
_LEAST = tl.constexpr(_LEAST_TEMPERATURE)


def processed_logits_torch(
    rows: OptionRows, temperature: torch.Tensor, thresholds: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Plain torch twin."""
    scale = temperature[rows.slots][:, None]
    scale = torch.where(scale > 0, scale.clamp(min=_LEAST_TEMPERATURE), 1.0)
    best = out.amax(dim=1, keepdim=True)
    scaled = torch.where(out == best, 0.0, (out - best) / scale)
    if thresholds is not None:
        scaled = scaled.masked_fill(out < thresholds[:, None], -torch.inf)
    out.copy_(torch.where(rows.column(PROCESSED)[:, None] == AS_SAMPLED, scaled, out))


@triton.jit
def _processed_logits_kernel(
    slots,
    table,
    table_stride,
    temperatures,
    temperature_stride,
    thresholds,
    vocab_size,
    out,
    out_stride,
    HAS_THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: its maximum, then its values."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(table + slot * table_stride + _PROCESSED) == _AS_SAMPLED:
        base = out + row * out_stride
        lane = tl.arange(0, BLOCK)
        most = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            inside = start + lane < vocab_size
            most = tl.maximum(most, tl.load(base + start + lane, mask=inside, other=-float("inf")))
        best = tl.max(most, axis=0)
        temperature = tl.load(temperatures + slot * temperature_stride)
        scale = tl.where(temperature > 0, tl.maximum(temperature, _LEAST), 1.0)
        threshold = tl.full((), -float("inf"), tl.float32)
        if HAS_THRESHOLD:
            threshold = tl.load(thresholds + row)
        for start in range(0, vocab_size, BLOCK):
            inside = start + lane < vocab_size
            x = tl.load(base + start + lane, mask=inside, other=-float("inf"))
            scaled = tl.where(x == best, 0.0, (x - best) / scale)
            tl.store(base + start + lane, tl.where(x < threshold, -float("inf"), scaled), mask=inside)


def processed_logits_triton(
    rows: OptionRows, temperature: torch.Tensor, thresholds: torch.Tensor | None, out: torch.Tensor
) -> None:
    """One program for every row; a row that wants other log-probabilities, or none, leaves at once."""
    _processed_logits_kernel[(out.shape[0],)](
        rows.slots,
        rows.options,
        rows.options.stride(0),
        temperature,
        temperature.stride(0),
        thresholds,
        out.shape[1],
        out,
        out.stride(0),
        HAS_THRESHOLD=thresholds is not None,
        BLOCK=_BLOCK if out.shape[1] > 1024 else 1024,
    )


def processed_logits(
    rows: OptionRows, temperature: torch.Tensor, thresholds: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Change `out` in place for the rows that want it; see the module's formula and shapes."""
    run = processed_logits_triton if use_triton(out) else processed_logits_torch
    run(rows, temperature, thresholds, out)
