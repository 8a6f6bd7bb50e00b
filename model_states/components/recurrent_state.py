"""`RecurrentState`: what recurrent layers keep of a sequence, a state of fixed size, as one more cache group.

A *state row* is the whole state of one request after some token, in all layers; it is one block of a cache group
whose window is two tokens. Block j of a request holds the state after the last computed token of its range
[j B, (j + 1) B), B = `block_size`. From that follows, with nothing made for it:

- a step that continues after c tokens reads block (c - 1) // B and writes block (c + q - 1) // B, and the blocks
  whose ends its q tokens cross; the blocks before are given back;
- a full block is never written again, so a prefix hit shares it and copies nothing: the next token goes to a block
  of the request's own;
- slots, preemption, eviction and accounting are those of every cache group.

How a layer uses it, in its forward (`RecurrentLayer.tensors` and `.step`):

    pool = layer.tensors["ssm"]                 # [num_rows, *shape], as declared
    step = layer.step                           # `RecurrentStep`: which rows to read and write, on the device
    initial = pool[step.source_rows[b]]         # row 0 is zero for ever: the state before the first token
    pool[step.final_rows[b]] = after the row's last token; 0 means write nothing (padding)
    pool[step.block_table[b, e // B - 1]] = after e tokens, for every multiple e of B in (c, c + q)
    pool[step.scratch_rows[b] + i] = after token i, i < q - 1, where scratch_rows[b] > 0 (the row holds drafts)

Several tokens of a row may have been computed before it begins (c > 0) at any query length. Source and final row may
be one: a kernel reads a part of the state before it writes that part, and final rows before the ends of blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import torch

from model_states.batch import InputBatch
from model_states.cache import CacheGroup, Caches, CacheTensor
from model_states.components.saved_state import SavedRows, StatePart
from model_states.config import ModelConfig
from model_states.errors import UnsupportedModelError
from model_states.hookspecs import hookimpl
from model_states.kernels.copy_rows import copy_rows
from model_states.kernels.state_rows import state_rows
from model_states.recurrent_step import CHUNK_SIZE, RecurrentStep

logger = logging.getLogger(__name__)

# Options of a model state with this component, for `ModelState.options`.
STATE_OPTIONS: Final[Mapping[str, str]] = {
    "state_dtype": "dtype of recurrent state: float32, bfloat16 or float16; the model's own by default",
    "state_block_size": "tokens between two saved states, which is what prefix hits are a multiple of",
}
DEFAULT_BLOCK_SIZE: Final = 256
_LARGEST_BLOCK: Final = 1 << 24  # positions are int32
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RecurrentLayer:
    """One layer's part of the state. tensors: name -> pool [num_rows, *shape], set when caches are allocated."""

    def __init__(self, name: str, owner: RecurrentState) -> None:
        self.name = name
        self.tensors: Mapping[str, torch.Tensor] = {}
        self._owner = owner

    @property
    def step(self) -> RecurrentStep:
        """The rows of the step that runs now."""
        step = self._owner.step
        assert step is not None, f"recurrent layer {self.name} was called outside a step"
        return step


class RecurrentState(StatePart):
    """Recurrent state of some layers, in pools of one cache group.

    layers: index -> `RecurrentLayer`, in the order of the declaration. group: the cache group.
    """

    records_step = True

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Mapping[str, CacheTensor]],
        prefix: str = "recurrent",
        is_alone: bool = False,
    ) -> None:
        """layers[i]: tensor name -> shape and dtype of one request's state in layer i. is_alone: the model has no
        attention.

        Raises `UnsupportedModelError` for a "state_block_size" that scans could not end at, or an unknown
        "state_dtype".
        """
        state_dtype(config)  # also where no layer has a state that it applies to
        if is_alone and config.attention_backend is not None:
            logger.warning(
                "attention_backend=%r: the model has no attention to use it", config.attention_backend
            )
        self.block_size = _block_size(config)
        self.layers = [RecurrentLayer(f"{prefix}.{index}", self) for index in range(len(layers))]
        self.step: RecurrentStep | None = None
        self._num_drafts = config.num_draft_tokens
        self.group = CacheGroup(
            prefix,
            self.block_size,
            {layer.name: dict(tensors) for layer, tensors in zip(self.layers, layers, strict=True)},
            sliding_window=2,
            num_scratch_blocks=config.max_num_reqs * self._num_drafts,
        )
        self._index = 0  # of the group in a batch's tuples
        self._first_scratch = 0
        int32 = partial(torch.zeros, dtype=torch.int32, device=config.device)
        self._rows = int32(4, config.max_num_reqs)
        self._token_rows = int32(config.max_num_batched_tokens)

    @hookimpl
    def cache_groups(self) -> list[CacheGroup]:
        """The one group of all layers."""
        return [self.group]

    @hookimpl
    def init_caches(self, caches: Caches) -> None:
        """Hand every layer its pools."""
        self._index = list(caches).index(self.group.name)
        for layer in self.layers:
            layer.tensors = caches[self.group.name][layer.name]
        num_rows = len(next(iter(self.layers[0].tensors.values())))
        self._first_scratch = num_rows - self.group.num_scratch_blocks

    def saved_rows(self, num_tokens: int) -> list[SavedRows]:
        """The one row that is the state after so many tokens."""
        column = (num_tokens - 1) // self.block_size
        pools = {f"{la.name}.{name}": pool for la in self.layers for name, pool in la.tensors.items()}
        return [SavedRows(self._index, range(column, column + 1), 1, pools)]

    @hookimpl
    def prepare_attn(self, batch: InputBatch) -> None:
        """Find the rows of this step, once for all layers."""
        num_rows = len(batch.idx_mapping)
        source_rows, final_rows, scratch_rows = self._rows[:3, :num_rows]
        token_rows = self._token_rows[: len(batch.input_ids)]
        table = batch.block_tables[self._index]
        state_rows(
            table,
            batch.query_start_loc,
            batch.seq_lens,
            batch.idx_mapping,
            batch.cu_num_logits,
            self.block_size,
            self._first_scratch,
            self._num_drafts,
            (source_rows, final_rows, scratch_rows, token_rows),
        )
        self.step = RecurrentStep(
            batch.query_start_loc,
            batch.seq_lens,
            table,
            self.block_size,
            source_rows,
            final_rows,
            scratch_rows,
            token_rows,
            is_decode=batch.max_query_len <= 1 and len(token_rows) == num_rows,
        )

    @hookimpl
    def postprocess_state(self, batch: InputBatch, num_rejected: torch.Tensor) -> None:
        """Where drafts were rejected, bring back the state after the last token that counts."""
        if not self._num_drafts:
            return
        step = self.step
        assert step is not None
        num_rows = len(batch.idx_mapping)
        is_back = (num_rejected[:num_rows] > 0) & (step.scratch_rows > 0)
        end = step.seq_lens - num_rejected[:num_rows]
        column = ((end - 1) // self.block_size).clamp_(min=0).long()
        target = step.block_table.gather(1, column[:, None])[:, 0]
        query_len = step.query_start_loc.diff()
        source_rows, target_rows = self._rows[2, :num_rows], self._rows[3, :num_rows]
        target_rows.copy_(torch.where(is_back, target, 0))
        source_rows.add_(query_len - num_rejected[:num_rows] - 1)
        for layer in self.layers:
            for pool in layer.tensors.values():
                copy_rows(pool, source_rows, target_rows)


def state_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype that the option "state_dtype" asks for, by default the model's.

    Raises `UnsupportedModelError` for another word.
    """
    name = config.options.get("state_dtype")
    if name is None:
        return config.dtype
    if name not in _DTYPES:
        raise UnsupportedModelError(f"state_dtype={name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _block_size(config: ModelConfig) -> int:
    """Tokens between saved states: what was asked for, or a default that hits of attention layers divide."""
    wanted = config.options.get("state_block_size")
    if wanted is None:
        return math.lcm(DEFAULT_BLOCK_SIZE, config.block_size)
    is_usable = isinstance(wanted, int) and 1 <= wanted <= _LARGEST_BLOCK
    if not is_usable or (wanted % CHUNK_SIZE and (wanted & (wanted - 1) or wanted > CHUNK_SIZE)):
        raise UnsupportedModelError(
            f"state_block_size={wanted!r} must be a power of two up to {CHUNK_SIZE}, or a multiple of {CHUNK_SIZE}"
            f" up to {_LARGEST_BLOCK}"
        )
    return int(wanted)
