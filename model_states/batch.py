"""What hooks see of a step and of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

RemoveReason = Literal["finished", "preempted", "aborted", "interrupted"]
IntArray = npt.NDArray[np.int32]


class RequestInputs(Protocol):
    """What hooks may read of a request that has no slot yet."""

    @property
    def req_id(self) -> str:
        """The caller's name of the request."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the user's prompt."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | npt.NDArray[np.int32]:
        """The user's prompt, [prompt_len]."""

    @property
    def model_inputs(self) -> Mapping[str, Any]:
        """What the model needs beside tokens."""

    @property
    def input_keys(self) -> Mapping[str, bytes]:
        """What the hook `input_keys` said of the model inputs; empty where nobody asked it."""


class RequestView(RequestInputs, Protocol):
    """What `add_request` may read of an admission. A resumed request has `prefill_len > prompt_len`."""

    @property
    def prefill_token_ids(self) -> Sequence[int] | npt.NDArray[np.int32]:
        """Every token known at admission, [prefill_len]."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose state is in the cache already (a prefix hit)."""


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Ids that some rows of logits may take; bit k of words[i, w] allows id 32 w + k. Other rows are free."""

    rows: torch.Tensor  # row of logits of each mask, int32 [n]
    words: torch.Tensor  # int32 [n, ceil(vocab_size / 32)]


@dataclass(slots=True)
class InputBatch:
    """One step, in batch rows. Tensors are views of persistent buffers; rows and tokens past the real counts are
    padding: their slot is the null slot, their lengths are 0 and their slot mapping is -1.

    Host copies (`_np`) hold real rows only. `max_seq_len` is an upper bound (the device's lengths are the truth).
    """

    num_reqs: int
    num_tokens: int
    idx_mapping: torch.Tensor  # batch_idx -> slot, int32 [num_reqs_padded]
    idx_mapping_np: IntArray  # [num_reqs]
    num_scheduled_tokens_np: IntArray  # [num_reqs]
    num_computed_tokens_np: IntArray  # [num_reqs], upper bound
    query_start_loc: torch.Tensor  # int32 [num_reqs_padded + 1]
    query_start_loc_np: IntArray  # [num_reqs + 1]
    seq_lens: torch.Tensor  # computed + scheduled, int32 [num_reqs_padded]
    input_ids: torch.Tensor  # int64 [num_tokens_padded]
    positions: torch.Tensor  # int64 [num_tokens_padded]
    block_tables: tuple[torch.Tensor, ...]  # per cache group, int32 [num_reqs_padded, max_blocks]
    slot_mappings: tuple[torch.Tensor, ...]  # per cache group, int64 [num_tokens_padded]
    logits_indices: torch.Tensor  # token of each logits row, int64 [num_logits_padded]; padding is token 0
    expanded_idx_mapping: torch.Tensor  # logits row -> slot, int32 [num_logits_padded]
    expanded_local_pos: torch.Tensor  # logits row -> 0 for the row's first logits, int32 [num_logits_padded]
    cu_num_logits: torch.Tensor  # int32 [num_reqs_padded + 1]
    cu_num_logits_np: IntArray  # [num_reqs + 1]
    max_query_len: int
    max_seq_len: int
    # Set for the sampler: its own name for the launches of this batch where a graph may hold them, and the masks of
    # constrained rows, which come after the forward.
    sampling_variant: str | None = None
    grammar_mask: GrammarMask | None = None
    # Per cache group, int32 [R + 1, max_blocks]: slot -> block ids, as they are when the step's hooks are called.
    slot_tables: tuple[torch.Tensor, ...] = ()

    @property
    def num_logits(self) -> int:
        """Rows of logits that this step computes."""
        return int(self.cu_num_logits_np[-1])
