"""RMS norms: which modules are one, found by what they compute."""

from __future__ import annotations

import torch
from torch import nn

from model_states.kernels.add_norm import RMSNorm, add_norm, rms_norm_torch
from model_states.rewrites.seen import close, floats_of, random_like, relative_error, tried

# An epsilon shows only beside small numbers. Normed, all are of a size, so that none hides another's error.
_SCALES = (1.0, 30.0, 1e-2, 1e-3)


def recognise_norm(module: nn.Module) -> RMSNorm | None:
    """The RMS norm that `module` computes, whatever it calls its parts; None for anything else."""
    parameters = list(module.parameters())
    if len(parameters) != 1 or parameters[0].ndim != 1 or any(module.children()):
        return None
    weight = parameters[0].detach()
    x = torch.stack([random_like(weight, weight.numel(), seed=i) * s for i, s in enumerate(_SCALES)])
    expected = tried(module, x)
    if expected is None or expected.shape != x.shape:
        return None
    candidates = [
        RMSNorm(scale, eps, rounds_first)
        for scale in (weight, 1.0 + weight.float())
        for eps in floats_of(module)
        for rounds_first in (True, False)
    ]
    # Where it rounds is the last thing to show, so the nearest is taken.
    best = min(candidates, key=lambda norm: relative_error(rms_norm_torch(x, norm), expected), default=None)
    return best if best is not None and close(rms_norm_torch(x, best), expected) else None


def norm_rows(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """The norm of x [num_rows, size], a new tensor."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    add_norm(x, None, None, norm, 1.0, out)
    return out
