"""Everything between the projection of queries, keys and values and attention, in one pass over memory.

qkv [num_tokens, num_heads * head_size + num_kv_heads * (head_size + head_size_v)] holds the heads of the queries, then
those of the keys, then those of the values. For every token t and head h, each step rounded to qkv's dtype,

    q[t, h] := rotate(norm(q[t, h]; q_norm))        in place
    key_cache[slot_mapping[t], h]   = rotate(norm(k[t, h]; k_norm))
    value_cache[slot_mapping[t], h] = v[t, h]

Norms are over one head, weight [head_size], and may be missing. rotate turns the pairs (x[a(i)], x[b(i)]) of the first
rotary_dim entries by the angle of row r = positions[t] (or t, without positions) of the tables, and leaves the rest:

    x[a(i)] := x[a(i)] * cos[r, i] - x[b(i)] * sin[r, i]
    x[b(i)] := x[b(i)] * cos[r, i] + x[a(i)] * sin[r, i]

with a(i), b(i) = i, i + rotary_dim / 2, or 2 i, 2 i + 1 where the pairs are interleaved. Products are rounded to the
tables' dtype and sums to qkv's, as they are in a model of separate operations. The caches are [num_blocks, block_size,
num_kv_heads, head_size(_v)], contiguous; tokens of slot mapping -1 are not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from model_states.attention.torch_backend import write_cache_torch
from model_states.kernels.add_norm import RMSNorm, normalised, rms_norm_torch
from model_states.kernels.dispatch import use_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.sizes import cdiv, next_power_of_2
from model_states.kernels.triton_import import tl, triton


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a row of qkv is cut into heads."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Widths of the queries, the keys and the values of one token."""
        return (
            self.num_heads * self.head_size,
            self.num_kv_heads * self.head_size,
            self.num_kv_heads * self.head_size_v,
        )


class Rotary(NamedTuple):
    """Tables of a rotary embedding: cos and sin [num_rows, rotary_dim / 2], last axis contiguous, in x's dtype or fp32.

    positions int64 [num_tokens] gives the row of each token; None: token t has row t.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None
    interleaved: bool


def rotate_torch(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """rotate of the formula above, for x [num_tokens, heads, head_size]."""
    cos, sin = rotary.cos, rotary.sin
    if rotary.positions is not None:
        cos, sin = cos[rotary.positions], sin[rotary.positions]
    cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rotary.interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def rope_write_torch(
    qkv: torch.Tensor,
    heads: HeadLayout,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    rotary: Rotary | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The formula above, for all tokens at once."""
    q, k, v = qkv.split(heads.sizes, -1)
    ready = []
    for x, norm in ((q, q_norm), (k, k_norm)):
        x = x.view(x.shape[0], -1, heads.head_size)
        x = x if norm is None else rms_norm_torch(x, norm)
        ready.append(x if rotary is None else rotate_torch(x, rotary))
    if q_norm is not None or rotary is not None:
        q.copy_(ready[0].flatten(1))
    write_cache_torch(
        ready[1],
        v.view(v.shape[0], heads.num_kv_heads, heads.head_size_v),
        key_cache,
        value_cache,
        slot_mapping,
    )


@triton.jit
def _write_heads(
    source,
    target,
    cos,
    sin,
    weight,
    eps,
    valid,
    HEAD_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Norm and rotate heads at source [BLOCK_H, 1], and write them to target [BLOCK_H, 1] where `valid`."""
    dtype: tl.constexpr = source.dtype.element_ty
    # Without a rotation the head is still taken as two halves.
    PAIRED: tl.constexpr = ROTARY_DIM if ROTARY_DIM > 0 else HEAD_SIZE
    REST: tl.constexpr = HEAD_SIZE - PAIRED
    i = tl.arange(0, BLOCK_PAIRS)[None, :]
    is_pair = i < PAIRED // 2
    at_a = 2 * i if INTERLEAVED else i
    at_b = 2 * i + 1 if INTERLEAVED else i + PAIRED // 2
    at_rest = PAIRED + tl.arange(0, BLOCK_REST)[None, :]
    is_rest = at_rest < HEAD_SIZE
    a = tl.load(source + at_a, mask=valid & is_pair, other=0.0).to(tl.float32)
    b = tl.load(source + at_b, mask=valid & is_pair, other=0.0).to(tl.float32)
    if REST > 0:
        rest = tl.load(source + at_rest, mask=valid & is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        mean = squares[:, None] / HEAD_SIZE
        weight_a = tl.load(weight + at_a, mask=is_pair, other=0.0).to(tl.float32)
        weight_b = tl.load(weight + at_b, mask=is_pair, other=0.0).to(tl.float32)
        a = normalised(a, mean, weight_a, eps, ROUNDS_FIRST, dtype)
        b = normalised(b, mean, weight_b, eps, ROUNDS_FIRST, dtype)
        if REST > 0:
            weight_rest = tl.load(weight + at_rest, mask=is_rest, other=0.0).to(tl.float32)
            rest = normalised(rest, mean, weight_rest, eps, ROUNDS_FIRST, dtype)
    if ROTARY_DIM > 0:
        c = tl.load(cos + i, mask=is_pair, other=0.0).to(tl.float32)
        s = tl.load(sin + i, mask=is_pair, other=0.0).to(tl.float32)
        exact: tl.constexpr = cos.dtype.element_ty
        ac, bs = (a * c).to(exact).to(tl.float32), (b * s).to(exact).to(tl.float32)
        bc, as_ = (b * c).to(exact).to(tl.float32), (a * s).to(exact).to(tl.float32)
        a, b = ac - bs, bc + as_
    out: tl.constexpr = target.dtype.element_ty
    tl.store(target + at_a, a.to(dtype).to(out), mask=valid & is_pair)
    tl.store(target + at_b, b.to(dtype).to(out), mask=valid & is_pair)
    if REST > 0:
        tl.store(target + at_rest, rest.to(dtype).to(out), mask=valid & is_rest)


@triton.jit(do_not_specialize=["q_eps", "k_eps"])
def _rope_write_kernel(
    qkv,
    cos,
    sin,
    positions,
    q_weight,
    k_weight,
    key_cache,
    value_cache,
    slot_mapping,
    qkv_stride,
    table_stride,
    q_eps,
    k_eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    Q_ROUNDS_FIRST: tl.constexpr,
    K_ROUNDS_FIRST: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    keys = qkv + token * qkv_stride + NUM_HEADS * HEAD_SIZE
    row = token
    if HAS_POSITIONS:
        row = tl.load(positions + token)
    cos += row * table_stride
    sin += row * table_stride
    if part < Q_PARTS:
        h = part * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        at = qkv + token * qkv_stride + h * HEAD_SIZE
        _write_heads(
            at,
            at,
            cos,
            sin,
            q_weight,
            q_eps,
            h < NUM_HEADS,
            HEAD_SIZE,
            Q_NORM,
            Q_ROUNDS_FIRST,
            ROTARY_DIM,
            INTERLEAVED,
            BLOCK_PAIRS,
            BLOCK_REST,
        )
    elif part < Q_PARTS + KV_PARTS:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        num_written = tl.where(slot >= 0, NUM_KV_HEADS, 0)
        h = (part - Q_PARTS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        _write_heads(
            keys + h * HEAD_SIZE,
            key_cache + (slot * NUM_KV_HEADS + h) * HEAD_SIZE,
            cos,
            sin,
            k_weight,
            k_eps,
            h < num_written,
            HEAD_SIZE,
            K_NORM,
            K_ROUNDS_FIRST,
            ROTARY_DIM,
            INTERLEAVED,
            BLOCK_PAIRS,
            BLOCK_REST,
        )
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        num_written = tl.where(slot >= 0, NUM_KV_HEADS, 0)
        h = (part - Q_PARTS - KV_PARTS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        d = tl.arange(0, BLOCK_V)[None, :]
        valid = (h < num_written) & (d < HEAD_SIZE_V)
        value = tl.load(keys + NUM_KV_HEADS * HEAD_SIZE + h * HEAD_SIZE_V + d, mask=valid)
        at = value_cache + (slot * NUM_KV_HEADS + h) * HEAD_SIZE_V + d
        tl.store(at, value.to(value_cache.dtype.element_ty), mask=valid)


def rope_write_triton(
    qkv: torch.Tensor,
    heads: HeadLayout,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    rotary: Rotary | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    shape: tuple[int, int] | None = None,
) -> None:
    """Launch one program for every token and every few heads; `shape` is (heads, warps), None chooses."""
    num_tokens = qkv.shape[0]
    if not num_tokens:
        return
    block_h, num_warps = shape or launch_shape(num_tokens, heads)
    positions = None if rotary is None else rotary.positions
    parts = cdiv(heads.num_heads, block_h) + 2 * cdiv(heads.num_kv_heads, block_h)
    _rope_write_kernel[(num_tokens, parts)](
        qkv,
        qkv if rotary is None else rotary.cos,
        qkv if rotary is None else rotary.sin,
        slot_mapping if positions is None else positions,
        qkv if q_norm is None else q_norm.weight,
        qkv if k_norm is None else k_norm.weight,
        key_cache,
        value_cache,
        slot_mapping,
        qkv.stride(0),
        0 if rotary is None else rotary.cos.stride(0),
        0.0 if q_norm is None else q_norm.eps,
        0.0 if k_norm is None else k_norm.eps,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        Q_ROUNDS_FIRST=q_norm is not None and q_norm.rounds_first,
        K_ROUNDS_FIRST=k_norm is not None and k_norm.rounds_first,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        HAS_POSITIONS=positions is not None,
        BLOCK_H=block_h,
        **_sizes(heads, 0 if rotary is None else 2 * rotary.cos.shape[1]),
        num_warps=num_warps,
        enable_fp_fusion=False,  # a product that is fused into a sum is not rounded
        **programmatic_launch(qkv),
    )


@cache
def _sizes(heads: HeadLayout, rotary_dim: int) -> dict[str, int]:
    paired = rotary_dim or heads.head_size
    return {
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_SIZE": heads.head_size,
        "HEAD_SIZE_V": heads.head_size_v,
        "ROTARY_DIM": rotary_dim,
        "BLOCK_PAIRS": next_power_of_2(paired // 2),
        "BLOCK_REST": next_power_of_2(max(1, heads.head_size - paired)),
        "BLOCK_V": next_power_of_2(heads.head_size_v),
    }


def launch_shape(num_tokens: int, heads: HeadLayout) -> tuple[int, int]:
    """(heads, warps) of a program."""
    return min(8, next_power_of_2(heads.num_kv_heads)), 4


def rope_write(
    qkv: torch.Tensor,
    heads: HeadLayout,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    rotary: Rotary | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Norm and rotate queries in place, and write keys and values to the cache; shapes and rules as above."""
    op = rope_write_triton if use_triton(qkv) else rope_write_torch
    op(qkv, heads, q_norm, k_norm, rotary, key_cache, value_cache, slot_mapping)
