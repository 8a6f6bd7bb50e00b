"""softplus(x) = log(1 + exp(x)) inside of other kernels, exact also where 1 + exp(x) rounds: a time step is small."""

from __future__ import annotations

from model_states.kernels.triton_import import tl, triton


@triton.jit
def softplus(x) -> tl.tensor:
    """softplus of fp32 x, as torch computes it."""
    e = tl.exp(tl.minimum(x, 20.0))
    # log1p(e) = log(w) e / (w - 1) with the rounded w = 1 + e.
    w = 1.0 + e
    log1p = tl.where(w == 1.0, e, tl.log(w) * (e / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, log1p)
