"""The attention backend interface: write new keys and values, then attend over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention layer needs.

    scale multiplies q . k. sliding_window: keys a query sees, itself included (None: all before it).
    soft_cap: scores become soft_cap * tanh(score / soft_cap). has_sinks: a learned logit per head joins the
    softmax's denominator and has no value. value_from_key: the value of a token is the first head_size_v
    entries of its key, and is not stored a second time.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    value_from_key: bool = False


@dataclass(slots=True)
class AttentionMetadata:
    """One step of one cache group; tensors are views of buffers that a graph can replay.

    Row b holds queries [query_start_loc[b], query_start_loc[b + 1]), which are the last ones of a sequence of
    seq_lens[b] tokens; query i of row b has position seq_lens[b] - query_len[b] + i. A padding row has
    query_len 0 and seq_len 0. Key position p of row b is in block block_table[b, p // block_size] at offset
    p % block_size. `max_query_len` and `max_seq_len` are host upper bounds, to size launches. Lengths and tables are
    written before the layer that attends begins: its kernels may read them while the launch before them still runs.
    """

    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]
    block_table: torch.Tensor  # int32 [num_reqs, max_blocks]
    slot_mapping: torch.Tensor  # int64 [num_tokens], -1 for padding
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """One implementation of paged attention. Stateless but for scratch buffers."""

    name: str

    def unsupported(
        self, spec: AttentionSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Why this backend cannot serve such a layer, or None when it can."""

    def write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key [num_tokens, num_kv_heads, head_size] and value [.., head_size_v] at `slot_mapping`.

        Caches are [num_blocks, block_size, num_kv_heads, head_size(_v)], contiguous. Tokens mapped to -1 are
        not written (the null block, block 0, may be). With `value_from_key` value is None, and value_cache is
        the view key_cache[..., :head_size_v].
        """

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of query [num_tokens, num_heads, head_size] over the cache.

        Returns [num_tokens, num_heads, head_size_v] in query's dtype, softmax and sums in fp32. Head h reads
        kv head h // (num_heads // num_kv_heads). Cache positions at or past seq_lens are never used, also
        when they hold NaN. Rows of padding tokens (past query_start_loc[-1]) are finite and nobody's.
        """
