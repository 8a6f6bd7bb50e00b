"""Paged attention by this package's own Triton kernels."""

from __future__ import annotations

import os

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec
from model_states.kernels.paged_attention_decode import (
    decode_config,
    paged_attention_decode_triton,
    scratch_size,
)
from model_states.kernels.paged_attention_prefill import paged_attention_prefill_triton, prefill_config
from model_states.kernels.write_cache import write_cache_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 256
# Where the value is a part of the key: of the value, and of the rest of the key.
_MAX_SHARED_SIZE, _MAX_REST = 512, 128


class TritonAttention:
    """Rows of one query go to the split-KV decode kernel, longer ones to the varlen kernel, in the same step.

    Both are launched over padded sizes and take every length from the device, so a step can be captured and
    replayed with other lengths, as long as max_query_len and the padded sizes are those of the capture.
    """

    name = "triton"

    def __init__(self) -> None:
        self._scratch: dict[torch.device, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def unsupported(
        self, spec: AttentionSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """CUDA (or Triton's interpreter), fp32, bf16 and fp16, head sizes up to 256, or 512 + 128 shared ones."""
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"Triton needs a CUDA device, and this is {device.type!r}"
        if dtype not in _DTYPES:
            return f"dtype {dtype} is none of {', '.join(map(str, _DTYPES))}"
        if reason := _too_wide(spec):
            return reason
        if spec.num_heads % spec.num_kv_heads:
            return f"num_heads={spec.num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}"
        return None

    def write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionBackend.write_cache`."""
        value = None if value is None else _last_axis_contiguous(value)
        write_cache_triton(_last_axis_contiguous(key), value, key_cache, value_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. Padding tokens get zeros."""
        query = _last_axis_contiguous(query)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.head_size_v)
        num_reqs, itemsize = metadata.seq_lens.shape[0], key_cache.element_size()
        step = (out, query, key_cache, value_cache, metadata, spec, sinks)
        if metadata.max_query_len > 1:
            paged_attention_prefill_triton(*step, prefill_config(metadata.max_query_len, spec, itemsize))
        config = decode_config(num_reqs, spec, metadata.max_seq_len, itemsize)
        scratch = self._get_scratch(scratch_size(num_reqs, spec, config), query.device)
        paged_attention_decode_triton(*step, scratch, config)
        return out

    def _get_scratch(self, size: int, device: torch.device) -> torch.Tensor:
        scratch = self._scratch.get(device)
        if scratch is not None and scratch.numel() >= size:
            return scratch
        grown = torch.empty(size, dtype=torch.float32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return grown  # of the graph's own pool: it must not be used outside that graph
        if scratch is not None:
            self._outgrown.append(scratch)  # a captured graph may hold its address
        self._scratch[device] = grown
        return grown


def _too_wide(spec: AttentionSpec) -> str | None:
    """Why the heads of `spec` do not fit in a program's registers and shared memory, or None."""
    if not spec.value_from_key:
        size = max(spec.head_size, spec.head_size_v)
        return f"head size {size} is over {_MAX_HEAD_SIZE}" if size > _MAX_HEAD_SIZE else None
    rest = spec.head_size - spec.head_size_v
    if spec.head_size_v > _MAX_SHARED_SIZE or rest > _MAX_REST:
        return f"head size {spec.head_size_v} + {rest} is over {_MAX_SHARED_SIZE} + {_MAX_REST}"
    return None


def _last_axis_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Kernels take any stride but that of the last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()
