"""Join what programs have summed over parts of the positions, and multiply it with the weight of each head's values.

For token t and head h, of part i the weighted sum a_i [hidden_size], the largest score m_i (times log2(e)) and the sum
of exponentials l_i, with m the largest m_i and V the head's weight, b its bias:

    out[t, h] = V (sum_i 2^(m_i - m) a_i / sum_i 2^(m_i - m) l_i) + b               b where all l_i are 0

sums [num_tokens, parts, num_heads, hidden_size] holds a; totals fp32 [num_tokens, parts, 2, num_heads] m and l;
value_weight [num_heads, head_size, hidden_size], value_bias [num_heads, head_size], out [num_tokens, num_heads,
head_size]. All are contiguous. hidden_size is a multiple of 128.
"""

from __future__ import annotations

import torch

from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton

MAX_PARTS = 32
_JOINED = 4  # parts that are joined while they are multiplied; more by a kernel before, of a program for each stretch


def join_parts_torch(
    out: torch.Tensor,
    sums: torch.Tensor,
    totals: torch.Tensor,
    value_weight: torch.Tensor,
    value_bias: torch.Tensor | None,
) -> None:
    """The formula above."""
    maxima, below = totals.unbind(2)
    shares = (maxima - maxima.amax(1, keepdim=True)).exp2()
    total = (shares * below).sum(1).unsqueeze(-1)
    mean = (sums.float() * shares.unsqueeze(-1)).sum(1) / total.where(total > 0.0, 1.0)
    result = torch.einsum("thk,hdk->thd", mean.to(sums.dtype).float(), value_weight.float())
    out.copy_(result if value_bias is None else result + value_bias)


@triton.jit
def _mean_kernel(
    out,
    sums,
    totals,
    parts,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Join the parts alone: out [num_tokens, num_heads, hidden_size]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, k = tl.arange(0, BLOCK_P), tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    items, is_part = token * parts + p, p < parts
    at = totals + items * 2 * NUM_HEADS + head
    maxima = tl.load(at, mask=is_part, other=-1e30)
    shares = tl.exp2(maxima - tl.max(maxima, 0))
    total = tl.sum(shares * tl.load(at + NUM_HEADS, mask=is_part, other=0.0), 0)
    part = tl.load(
        sums + ((items * NUM_HEADS + head) * SIZE)[:, None] + k[None, :], mask=is_part[:, None], other=0.0
    )
    mean = tl.sum(part.to(tl.float32) * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (token * NUM_HEADS + head) * SIZE + k, mean.to(out.dtype.element_ty))


@triton.jit
def _join_kernel(
    out,
    sums,
    totals,
    weight,
    bias,
    num_tokens,
    parts,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    p, d, k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
    items = (t.to(tl.int64) * parts)[:, None] + p[None, :]
    is_item = (t < num_tokens)[:, None] & (p < parts)[None, :]
    shares = is_item.to(tl.float32)
    if totals is not None:  # else the one part is the mean
        at = totals + items * 2 * NUM_HEADS + head
        maxima = tl.load(at, mask=is_item, other=-1e30)
        shares = tl.exp2(maxima - tl.max(maxima, 1)[:, None])
        total = tl.sum(shares * tl.load(at + NUM_HEADS, mask=is_item, other=0.0), 1)
        shares /= tl.where(total == 0.0, 1.0, total)[:, None]
    sums += (items * NUM_HEADS + head)[:, :, None] * SIZE + k[None, None, :]
    weight += (head * HEAD_SIZE + d)[:, None] * SIZE + k[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for k0 in range(0, SIZE, BLOCK_K):
        part = tl.load(sums + k0, mask=is_item[:, :, None], other=0.0)
        w = tl.load(weight + k0, mask=(d < HEAD_SIZE)[:, None], other=0.0)
        y = tl.sum(part.to(tl.float32) * shares[:, :, None], 1)
        acc = tl.dot(y.to(w.dtype), tl.trans(w), acc)
    if bias is not None:
        acc += tl.load(bias + head * HEAD_SIZE + d, mask=d < HEAD_SIZE, other=0.0).to(tl.float32)[None, :]
    target = out + (t.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(t < num_tokens)[:, None] & (d < HEAD_SIZE)[None, :])


def join_parts_triton(
    out: torch.Tensor,
    sums: torch.Tensor,
    totals: torch.Tensor,
    value_weight: torch.Tensor,
    value_bias: torch.Tensor | None,
) -> None:
    """Launch over (blocks of tokens, heads); where there are many parts, behind the kernel that joins them."""
    (num_tokens, parts, num_heads, size), head_size = sums.shape, out.shape[2]
    joined = totals if parts <= _JOINED else None
    if joined is None:
        mean = torch.empty_like(sums[:, 0])
        _mean_kernel[(num_tokens, num_heads, size // 128)](
            *(mean, sums, totals, parts),
            NUM_HEADS=num_heads,
            SIZE=size,
            BLOCK_P=triton.next_power_of_2(parts),
            BLOCK_K=128,
            num_warps=4,
            **programmatic_launch(out),
        )
        sums, parts = mean, 1
    block_p = triton.next_power_of_2(parts)
    _join_kernel[(triton.cdiv(num_tokens, 16), num_heads)](
        *(out, sums, joined, value_weight, value_bias, num_tokens, parts),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        SIZE=size,
        BLOCK_T=16,
        BLOCK_P=block_p,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        BLOCK_K=min(128, 256 // block_p),
        num_warps=4,
        num_stages=6,  # weights come from memory, and few programs ask for them
        **programmatic_launch(out),
    )
