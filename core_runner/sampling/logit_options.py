"""`LogitOptions`: what each slot wants changed about its logits before an id is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from core_runner.sampling.option_rows import (
    AS_ADJUSTED,
    AS_SAMPLED,
    BITS_ROW,
    ENTRY_ROW,
    FREQUENCY,
    IS_END,
    MASK_ROW,
    MIN_TOKENS,
    NUM_ENTRIES,
    NUM_OPTIONS,
    NUM_WORDS,
    PRESENCE,
    PROCESSED,
    REPETITION,
    SEEN_ROW,
    WORD_ROW,
    OptionRows,
    TokenHistory,
)
from core_runner.sampling.slot_rows import SeenRows, SlotRows
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import IntArray
from model_states.batch import InputBatch
from model_states.staged import StagedTensor

# Bits of `uses_np`, the host's word on what a slot asks for.
_PENALTIES, _MASK, _ENTRIES, _WORDS, _PROCESSED = 1, 2, 4, 8, 16
_NO_PENALTIES = (1.0, 0.0, 0.0)
_REPETITION_LIMIT = 1e20  # keeps a logit that is divided by it inside float32


class LogitOptions:
    """Masks, bias, minimum length and penalties of every slot; nothing is allocated before a request uses it.

    vocab_size: ids that may be sampled. history: the slots' tokens. eos_token_ids: the model's end ids.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        history: TokenHistory,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._vocab_size, self._history, self._device = vocab_size, history, device
        self._eos_token_ids = tuple(eos_token_ids)
        self._options: StagedTensor | None = None
        self._seen = SeenRows(vocab_size, device)
        self._masks, self._entries, self._entry_bits, self._words = (SlotRows(device) for _ in range(4))
        self._uses_np: npt.NDArray[np.uint8] = np.zeros(max_num_reqs + 1, dtype=np.uint8)
        self._is_stale_np: npt.NDArray[np.bool_] = np.zeros(max_num_reqs + 1, dtype=np.bool_)
        self._num_entries_np: IntArray = np.zeros(max_num_reqs + 1, dtype=np.int32)
        self._num_words_np: IntArray = np.zeros(max_num_reqs + 1, dtype=np.int32)

    def add(self, slot: int, params: SamplingParams) -> None:
        """Write every option of `slot`; the device sees it after `apply_staged_writes`.

        params: with ids inside the vocabulary and bad words as tokens, which admission has seen to.
        """
        row = _default_row()
        uses = self._set_penalties(row, slot, params) | self._set_mask(row, slot, params)
        uses |= self._set_entries(row, slot, params) | self._set_words(row, slot, params)
        if params.logprobs is not None and params.logprobs_mode != "raw":
            row[PROCESSED] = AS_SAMPLED if params.logprobs_mode == "processed" else AS_ADJUSTED
            uses |= _PROCESSED
        self._uses_np[slot] = uses
        self._num_entries_np[slot], self._num_words_np[slot] = row[NUM_ENTRIES], row[NUM_WORDS]
        if uses or self._is_stale_np[slot]:
            self._table().stage(slot, 0, row)
        self._is_stale_np[slot] = bool(uses)

    def remove(self, slot: int) -> None:
        """Give back the rows of `slot`. Its options stay on the device until the next `add` writes all of them."""
        for rows in (self._seen, self._masks, self._entries, self._entry_bits, self._words):
            rows.give_back(slot)
        self._uses_np[slot] = self._num_entries_np[slot] = self._num_words_np[slot] = 0

    def apply_staged_writes(self) -> None:
        """Bring what `add` wrote to the device, in stream order; nothing if there is nothing new."""
        for rows in (self._masks, self._entries, self._entry_bits, self._words):
            rows.apply()
        if self._options is not None:
            self._options.apply()

    def rows(self, batch: InputBatch, num_logits: int) -> OptionRows | None:
        """The kernels' view of a step's first `num_logits` rows of logits; None if no request of it uses any."""
        slots = batch.idx_mapping_np
        uses = int(np.bitwise_or.reduce(self._uses_np[slots], initial=0))
        if not uses:
            return None
        return OptionRows(
            slots=batch.expanded_idx_mapping[:num_logits],
            logits_indices=batch.logits_indices[:num_logits],
            num_drafts=batch.expanded_local_pos[:num_logits],
            input_ids=batch.input_ids,
            positions=batch.positions,
            history=self._history,
            options=self._table().tensor,
            seen=self._seen.tensor if uses & _PENALTIES else None,
            seen_bits=self._seen.bits if uses & _PENALTIES else None,
            masks=self._masks.tensor if uses & _MASK else None,
            entries=self._entries.tensor if uses & _ENTRIES else None,
            entry_bits=self._entry_bits.tensor if uses & _ENTRIES else None,
            words=self._words.tensor if uses & _WORDS else None,
            max_entries=int(self._num_entries_np[slots].max(initial=0)),
            max_words=int(self._num_words_np[slots].max(initial=0)),
            any_processed=bool(uses & _PROCESSED),
        )

    def _table(self) -> StagedTensor:
        """The options of every slot. The null slot's row asks for nothing."""
        if self._options is None:
            self._options = StagedTensor((len(self._uses_np), NUM_OPTIONS), torch.int32, self._device)
            self._options.tensor.copy_(torch.from_numpy(_default_row()))
        return self._options

    def _set_penalties(self, row: IntArray, slot: int, params: SamplingParams) -> int:
        given = _penalties(params)
        if given == _NO_PENALTIES:
            return 0
        floats = row.view(np.float32)
        floats[REPETITION] = min(max(given[0], 1 / _REPETITION_LIMIT), _REPETITION_LIMIT)
        floats[FREQUENCY], floats[PRESENCE] = given[1:]
        row[SEEN_ROW] = self._seen.take(slot)
        return _PENALTIES

    def _set_mask(self, row: IntArray, slot: int, params: SamplingParams) -> int:
        if params.allowed_token_ids is None:
            return 0
        row[MASK_ROW] = self._masks.put(slot, self._bits(params.allowed_token_ids))
        return _MASK

    def _bits(self, ids: Sequence[int]) -> IntArray:
        """Bit id % 32 of word id // 32 is set for each of `ids`."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.bool_)
        bits[list(ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _set_entries(self, row: IntArray, slot: int, params: SamplingParams) -> int:
        """Bias, bad words of one token and end ids, each id once, and only if it is allowed at all."""
        bias = dict(params.logit_bias or {})
        bias |= {
            word[0]: -math.inf for word in params.bad_words if len(word) == 1 and not isinstance(word, str)
        }
        ends = {*params.stop_token_ids, *self._eos_token_ids} if params.min_tokens else set()
        ids = [i for i in {*bias, *ends} if i < self._vocab_size]
        if params.allowed_token_ids is not None:
            ids = list(set(params.allowed_token_ids).intersection(ids))
        if not ids:
            return 0
        pairs = np.empty((len(ids), 2), dtype=np.int32)
        pairs[:, 0] = [i + IS_END if i in ends else i for i in ids]
        pairs[:, 1] = np.array([bias.get(i, 0.0) for i in ids], dtype=np.float32).view(np.int32)
        row[MIN_TOKENS], row[NUM_ENTRIES] = params.min_tokens, len(ids)
        row[ENTRY_ROW] = self._entries.put(slot, pairs.reshape(-1))
        row[BITS_ROW] = self._entry_bits.put(slot, self._bits(ids))
        return _ENTRIES

    def _set_words(self, row: IntArray, slot: int, params: SamplingParams) -> int:
        words = [word for word in params.bad_words if len(word) > 1 and not isinstance(word, str)]
        if not words:
            return 0
        starts = len(words) + 1 + np.cumsum([0, *map(len, words)])
        values = np.concatenate([starts, *words]).astype(np.int32)
        row[NUM_WORDS] = len(words)
        row[WORD_ROW] = self._words.put(slot, values)
        return _WORDS


def changes_logits(params: SamplingParams) -> bool:
    """Whether a request with these parameters needs `LogitOptions` at all."""
    return bool(
        params.bad_words
        or params.logit_bias
        or params.min_tokens
        or params.allowed_token_ids is not None
        or _penalties(params) != _NO_PENALTIES
        or (params.logprobs is not None and params.logprobs_mode != "raw")
    )


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _default_row() -> IntArray:
    """Options of a slot that asks for nothing."""
    row = np.zeros(NUM_OPTIONS, dtype=np.int32)
    row.view(np.float32)[REPETITION] = 1.0
    row[[SEEN_ROW, MASK_ROW, ENTRY_ROW, BITS_ROW, WORD_ROW]] = -1
    return row
