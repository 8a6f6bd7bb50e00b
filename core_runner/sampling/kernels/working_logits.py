"""The working copy of the logits: float32, only allowed ids, penalized; one pass over the logits.

    x               = logits[row, id] where the slot's mask allows the id (or it is NaN), else -inf
    out[row, id]    = penalized(x)                                         see `penalties`

The copy is float32 whatever the logits are: a biased or penalized logit rounded to bfloat16 would tie with others, and
the stream must not depend on whether somebody else in the batch needs the logits as they were. A row whose slot
asks for nothing is copied, so its values are the same. A NaN stays, masked or not: the row must fail.

logits [n, >= vocab_size] (any float type, strided rows), out float32 [n, vocab_size]; the rest in `OptionRows`.
"""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.penalties import penalize, penalize_torch
from core_runner.sampling.option_rows import MASK_ROW, OptionRows
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_BLOCK = 2048
_MASK_ROW = tl.constexpr(MASK_ROW)


def working_logits_torch(logits: torch.Tensor, vocab_size: int, rows: OptionRows, out: torch.Tensor) -> None:
    """Plain torch twin."""
    x = logits[:, :vocab_size].float()
    ids = torch.arange(vocab_size, device=x.device)
    if rows.masks is not None:
        mask_row = rows.column(MASK_ROW)[:, None]
        words = rows.masks[mask_row.clamp(min=0), ids // 32]
        allowed = ((words >> (ids % 32)) & 1 == 1) | (mask_row < 0)
        x = torch.where(allowed | x.isnan(), x, -torch.inf)
    if rows.seen is not None:
        x = penalize_torch(x, ids.expand(len(x), -1), rows)
    out.copy_(x)


@triton.jit
def _working_logits_kernel(
    logits,
    logits_stride,
    vocab_size,
    slots,
    logits_indices,
    num_drafts,
    input_ids,
    table,
    table_stride,
    masks,
    masks_stride,
    seen,
    seen_stride,
    out,
    out_stride,
    HAS_MASKS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    x = tl.load(logits + row * logits_stride + ids, mask=inside, other=0).to(tl.float32)
    at = table + tl.load(slots + row).to(tl.int64) * table_stride
    if HAS_MASKS:
        mask_row = tl.load(at + _MASK_ROW).to(tl.int64)
        if mask_row >= 0:
            words = tl.load(masks + mask_row * masks_stride + ids // 32, mask=inside, other=0)
            x = tl.where(((words >> (ids % 32)) & 1 == 1) | (x != x), x, -float("inf"))
    if HAS_SEEN:
        index, drafts = tl.load(logits_indices + row), tl.load(num_drafts + row)
        x = penalize(x, ids, inside, at, seen, seen_stride, input_ids, index, drafts)
    tl.store(out + row * out_stride + ids, x, mask=inside)


def working_logits_triton(logits: torch.Tensor, vocab_size: int, rows: OptionRows, out: torch.Tensor) -> None:
    """One program for every block of every row."""
    _working_logits_kernel[(logits.shape[0], triton.cdiv(vocab_size, _BLOCK))](
        logits,
        logits.stride(0),
        vocab_size,
        rows.slots,
        rows.logits_indices,
        rows.num_drafts,
        rows.input_ids,
        rows.options,
        rows.options.stride(0),
        rows.masks,
        0 if rows.masks is None else rows.masks.stride(0),
        rows.seen,
        0 if rows.seen is None else rows.seen.stride(0),
        out,
        out.stride(0),
        HAS_MASKS=rows.masks is not None,
        HAS_SEEN=rows.seen is not None,
        BLOCK=_BLOCK,
    )


def working_logits(logits: torch.Tensor, vocab_size: int, rows: OptionRows, out: torch.Tensor) -> None:
    """Fill `out` for every row of logits; see the module's formula and shapes."""
    run = working_logits_triton if use_triton(logits) else working_logits_torch
    run(logits, vocab_size, rows, out)
