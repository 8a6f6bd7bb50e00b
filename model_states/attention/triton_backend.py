"""Paged attention by this package's own Triton kernels."""

from __future__ import annotations

import os

import torch

from model_states.attention.interface import AttentionMetadata, AttentionSpec
from model_states.kernels.paged_attention_decode import (
    decode_config,
    paged_attention_decode_triton,
    scratch_sizes,
    short_query_len,
)
from model_states.kernels.paged_attention_prefill import paged_attention_prefill_triton, prefill_config
from model_states.kernels.write_cache import write_cache_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 256
# Where the value is a part of the key: of the value, and of the rest of the key.
_MAX_SHARED_SIZE, _MAX_REST = 512, 128

_Scratch = tuple[torch.Tensor, torch.Tensor]  # of the decode kernel: parts, and counters of them


class TritonAttention:
    """Rows of few queries go to the split-KV decode kernel, longer ones to the prefill kernel, in the same step.

    Both are launched over padded sizes and take every length from the device, so a step can be captured and
    replayed with other lengths, as long as max_query_len and the padded sizes are those of the capture. In a
    captured step the two run side by side.
    """

    name = "triton"

    def __init__(self) -> None:
        self._scratch: dict[torch.device, _Scratch] = {}
        self._outgrown: list[_Scratch] = []
        self._beside: dict[torch.device, torch.cuda.Stream] = {}

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
        itemsize = key_cache.element_size()
        config = decode_config(metadata.seq_lens.shape[0], spec, itemsize)
        short = short_query_len(spec, config)
        step = (out, query, key_cache, value_cache, metadata, spec, sinks)
        beside = None
        if metadata.max_query_len > short:
            beside = self._stream_beside(query.device)
            with torch.cuda.stream(beside):
                paged_attention_prefill_triton(
                    *step, short, prefill_config(metadata.max_query_len, spec, itemsize)
                )
        scratch = self._get_scratch(scratch_sizes(metadata, spec, config), query.device)
        paged_attention_decode_triton(*step, config, *scratch)
        if beside is not None:
            torch.cuda.current_stream(query.device).wait_stream(beside)
        return out

    def _stream_beside(self, device: torch.device) -> torch.cuda.Stream | None:
        """A stream that goes on from here, in a capture; None elsewhere, where the host would take longer to fork."""
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return None
        if device not in self._beside:
            self._beside[device] = torch.cuda.Stream(device)
        stream = self._beside[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def _get_scratch(self, sizes: tuple[int, int], device: torch.device) -> _Scratch:
        held = self._scratch.get(device)
        if held is not None and all(t.numel() >= size for t, size in zip(held, sizes, strict=True)):
            return held
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _new_scratch(sizes, device)  # of the graph's own pool: not to be used outside that graph
        if held is not None:
            self._outgrown.append(held)  # a captured graph may hold its addresses
            sizes = (max(sizes[0], held[0].numel()), max(sizes[1], held[1].numel()))
        self._scratch[device] = _new_scratch(sizes, device)
        return self._scratch[device]


def _new_scratch(sizes: tuple[int, int], device: torch.device) -> _Scratch:
    parts = torch.empty(sizes[0], dtype=torch.float32, device=device)
    return parts, torch.zeros(sizes[1], dtype=torch.int32, device=device)


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
