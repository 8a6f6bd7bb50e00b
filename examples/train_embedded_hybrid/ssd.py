"""A Mamba-2 mixer's forward for training: whole sequences from a zero state, in chunks of matrix products.

The recurrence of one head, with x [P], b and c [N] and the time step dt of a token (Dao and Gu 2024):

    h_t = exp(dt_t a) h_{t-1} + dt_t b_t x_t^T        [N, P]
    y_t = h_t^T c_t + d x_t                           [P]

Inside a chunk of Q tokens it is attention without a softmax, whose scores carry the decay between two tokens; between
chunks only states are handed on. All of it is matrix products, which autograd differentiates and a compiler fuses.
transformers' own torch forward computes the same and is several times slower.
"""

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def ssd(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk: int
) -> torch.Tensor:
    """y [rows, len, heads, P] without the skip d x, in x's dtype.

    x: [rows, len, heads, P]. dt: [rows, len, heads], float32, positive. a: [heads], float32, negative. b, c:
    [rows, len, N], one group for all heads. `len` is a multiple of `chunk`. Products are of x's dtype with
    float32 sums; decays and the states between chunks are float32.
    """
    rows, length, heads, size = x.shape
    split = (rows, length // chunk, chunk)
    x, b, c = x.reshape(*split, heads, size), b.reshape(*split, -1), c.reshape(*split, -1)
    dt = dt.reshape(*split, heads).transpose(2, 3)  # [rows, chunks, heads, chunk]
    total = (dt * a[:, None]).cumsum(-1)  # log of the decay from a chunk's start to the end of each token
    inside = _inside(x, dt, total, b, c)
    weighted = x * ((total[..., -1:] - total).exp() * dt).transpose(2, 3)[..., None].to(x.dtype)
    added = b.transpose(2, 3) @ weighted.flatten(3)  # [rows, chunks, N, heads P]
    before = _states_before(added.unflatten(3, (heads, size)), total[..., -1])
    carried = (c @ before.to(x.dtype)).unflatten(3, (heads, size))
    y = inside + carried * total.exp().transpose(2, 3)[..., None].to(x.dtype)
    return y.reshape(rows, length, heads, size)


def _inside(
    x: torch.Tensor, dt: torch.Tensor, total: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """What the tokens of a chunk say to the later ones of the same chunk, [rows, chunks, chunk, heads, P]."""
    past = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~past, float("-inf")).exp()
    scores = (c @ b.transpose(2, 3))[:, :, None] * decay * dt[..., None, :]
    return (scores.to(x.dtype) @ x.transpose(2, 3)).transpose(2, 3)


def _states_before(added: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """States at the start of each chunk, [rows, chunks, N, heads P], float32.

    added: [rows, chunks, N, heads, P], what each chunk adds by its end. total: [rows, chunks, heads], the log of
    the decay over each chunk. Chunk c starts with the sum over z < c of what z added, decayed over those between.
    """
    reached = total.transpose(1, 2).cumsum(-1)  # [rows, heads, chunks], to the end of each chunk
    start = reached - total.transpose(1, 2)
    count = total.shape[1]
    past = torch.ones(count, count, dtype=torch.bool, device=total.device).tril(-1)
    decay = (start[..., :, None] - reached[..., None, :]).masked_fill(~past, float("-inf")).exp()
    flat = added.float().permute(0, 3, 1, 2, 4).flatten(3)  # [rows, heads, chunks, N P]
    before = (decay @ flat).unflatten(3, (added.shape[2], added.shape[4]))
    return before.permute(0, 2, 3, 1, 4).flatten(3)


def causal_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The depthwise convolution over the last tokens as shifted sums: x [rows, len, size], weight [size, width]."""
    width = weight.shape[1]
    padded = functional.pad(x, (0, 0, width - 1, 0))
    taps = (padded[:, k : k + x.shape[1]] * weight[:, k] for k in range(width))
    return sum(taps, start=bias)


def mixer_forward(mixer: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """What transformers' mixer computes of whole sequences [rows, len, hidden], with the same parameters."""
    size, state_size = mixer.intermediate_size, mixer.ssm_state_size
    projected = mixer.in_proj(hidden_states)
    gate, mixed, dt = projected.split([size, size + 2 * state_size, mixer.num_heads], -1)
    with torch.autocast(hidden_states.device.type, enabled=False):
        weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
        convolved = functional.silu(causal_conv(mixed.float(), weight, bias)).to(mixed.dtype)
        x, b, c = convolved.split([size, state_size, state_size], -1)
        x = x.unflatten(2, (mixer.num_heads, mixer.head_dim))
        dt = functional.softplus(dt.float() + mixer.dt_bias)
        y = ssd(x, dt, -mixer.A_log.float().exp(), b, c, mixer.training_chunk)
        y = y + x * mixer.D[:, None].to(x.dtype)
        y = mixer.norm(y.flatten(2), gate)
    return mixer.out_proj(y)


def train_in_chunks(mixers: list[nn.Module], chunk: int) -> None:
    """Give each mixer this forward; raises `ValueError` for one that it would compute wrongly."""
    for mixer in mixers:
        low, high = mixer.time_step_limit
        if mixer.n_groups != 1 or low > 0.0 or high < float("inf"):
            raise ValueError(
                f"{type(mixer).__name__} has {mixer.n_groups} groups and a time step limit of {low} to {high}; this "
                "forward has one group and no limit: change the configuration"
            )
        mixer.training_chunk = chunk
        mixer.forward = types.MethodType(mixer_forward, mixer)
