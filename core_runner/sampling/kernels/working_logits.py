"""The working copy of the logits, float32: what an overlay makes of them, in full, for what changes them further.

    out[row, id] = the value of `overlay`, whose `values` are out itself

logits [n, >= vocab_size] (any float type, strided rows), out float32 [n, vocab_size]; the rest in `OptionRows`.
"""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.noise import GROUP
from core_runner.sampling.kernels.overlay import Overlay, kernel_argument, overlaid, overlaid_torch
from model_states.kernels.dispatch import use_triton
from model_states.kernels.triton_import import tl, triton

_GROUPS = 2048 // GROUP  # of one program
_GROUP = tl.constexpr(GROUP)


def working_logits_torch(logits: torch.Tensor, vocab_size: int, overlay: Overlay) -> None:
    """Plain torch twin."""
    overlay.values.copy_(overlaid_torch(logits, vocab_size, overlay))


@triton.jit
def _working_logits_kernel(
    logits, logits_stride, vocab_size, overlay, out, out_stride, GROUPS: tl.constexpr
) -> None:
    """GROUPS groups of one row. Each value of `out` is read, if it is, and written by one thread."""
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row = tl.program_id(1).to(tl.int64)
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=-float("inf"))
    x = overlaid(x.to(tl.float32), ids, groups, row, vocab_size, overlay)
    tl.store(out + row * out_stride + ids, x, mask=ids < vocab_size)


def working_logits_triton(logits: torch.Tensor, vocab_size: int, overlay: Overlay) -> None:
    """One program for some groups of every row."""
    _working_logits_kernel[(triton.cdiv(vocab_size, _GROUPS * GROUP), logits.shape[0])](
        logits,
        logits.stride(0),
        vocab_size,
        kernel_argument(overlay),
        overlay.values,
        overlay.values.stride(0),
        GROUPS=_GROUPS,
    )


def working_logits(logits: torch.Tensor, vocab_size: int, overlay: Overlay) -> None:
    """Fill all of `overlay.values`; see the module's formula and shapes."""
    run = working_logits_triton if use_triton(logits) else working_logits_torch
    run(logits, vocab_size, overlay)
