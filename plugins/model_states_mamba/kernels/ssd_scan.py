"""The state space of Mamba-2, with one decay for each head (SSD), over rows of any length.

For token t of head h (group g = h // (H // G)), with s = clamp(softplus(dt[t, h] + dt_bias[h]), dt_limits):

    state = exp(s a[h]) state + s x[t, h] b[t, g]^T        [P, N]
    y[t, h] = state c[t, g] + d[h] x[t, h]                 [P]

The scan takes a chunk of tokens at once: with l the cumulative sum of s a over the chunk, token t gathers
exp(l[t] - l[u]) s[u] (c[t] . b[u]) x[u] from the tokens u <= t and exp(l[t]) state c[t] from before. Decode steps
take one token of each row. x, y [num_tokens, H, P]; dt [num_tokens, H]; b, c [num_tokens, G, N], all with tokens apart
and the rest contiguous; a, d, dt_bias fp32 [H]; pool [num_rows, H, P, N] of any float dtype gives and takes states as
`RecurrentStep` says. Sums are fp32. Padding tokens of y are left alone, or zero in a decode step.
"""

from __future__ import annotations

import torch

from model_states.kernels.dispatch import use_triton
from model_states.recurrent_step import CHUNK_SIZE, RecurrentStep
from model_states_mamba.kernels.ssd_chunks import ssd_chunks_triton
from model_states_mamba.kernels.ssd_decode import ssd_decode_torch, ssd_decode_triton
from model_states_mamba.kernels.ssd_parts import (
    Gated,
    SsdWeights,
    by_head,
    gate_torch,
    num_pieces,
    time_steps,
)

__all__ = ["Gated", "SsdWeights", "num_pieces", "ssd_scan", "ssd_scan_torch", "ssd_scan_triton"]


def ssd_scan_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
    after: Gated | None = None,
) -> None:
    """The chunked form above, row by row."""
    if step.is_decode:
        ssd_decode_torch(x, dt, b, c, weights, pool, step, y)
    else:
        _scan_torch(x, dt, b, c, weights, pool, step, y)
    if after is not None:
        gate_torch(y, after)


def _scan_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
) -> None:
    seconds = time_steps(dt, weights)
    for source, chunks in step.chunks(CHUNK_SIZE):
        state = pool[source].float()
        for start, stop, targets in chunks:
            tokens = slice(start, stop)
            y[tokens], state = _chunk_torch(x[tokens], seconds[tokens], b[tokens], c[tokens], weights, state)
            for target in targets:
                pool[target] = state.to(pool.dtype)


def _chunk_torch(
    x: torch.Tensor,
    seconds: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the state after the tokens of one chunk, both fp32."""
    x, b, c = x.float(), by_head(b, x.shape[1]), by_head(c, x.shape[1])
    decay = (seconds * weights.a).cumsum(0)  # [n, H]
    future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
    between = (decay[:, None] - decay).masked_fill(future[..., None], -torch.inf).exp()
    gathered = torch.einsum("thn,uhn->tuh", c, b) * between * seconds
    y = torch.einsum("tuh,uhp->thp", gathered, x)
    y += torch.einsum("thn,hpn->thp", c, state) * decay.exp()[..., None] + weights.d[:, None] * x
    left = (decay[-1] - decay).exp() * seconds
    state = state * decay[-1].exp()[:, None, None] + torch.einsum("thp,thn,th->hpn", x, b, left)
    return y, state


def ssd_scan_triton(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
    after: Gated | None = None,
) -> None:
    """Rows of one token by themselves, then those of several."""
    ssd_decode_triton(x, dt, b, c, weights, pool, step, y, after)
    if not step.is_decode:
        ssd_chunks_triton(x, dt, b, c, weights, pool, step, y, after)


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SsdWeights,
    pool: torch.Tensor,
    step: RecurrentStep,
    y: torch.Tensor,
    after: Gated | None = None,
) -> None:
    """Write `y`, and the states of the step to `pool`; `after` says what follows y."""
    op = ssd_scan_triton if use_triton(x) else ssd_scan_torch
    op(x, dt, b, c, weights, pool, step, y, after)
