"""What the kernels that change logits read: one row of integers per slot, and tables that few slots have rows of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

# Columns of `OptionRows.options`. A row number of -1 says that the slot does not use the table.
REPETITION, FREQUENCY, PRESENCE, MIN_TOKENS = 0, 1, 2, 3
SEEN_ROW, NUM_COUNTED, MASK_ROW, ENTRY_ROW, NUM_ENTRIES, BITS_ROW, WORD_ROW, NUM_WORDS, PROCESSED = range(
    4, 13
)
NUM_OPTIONS = 13

# Values of `PROCESSED`: which log-probabilities a slot wants, where not raw ones.
AS_SAMPLED, AS_ADJUSTED = 1, 2

# Added to an id of an entry that ends the request, and to a count of an id that the prompt holds.
IS_END = 1 << 30
IN_PROMPT = 1 << 30


class TokenHistory(NamedTuple):
    """Tokens of every slot as the device knows them."""

    all_token_ids: torch.Tensor  # int32 [R + 1, L]
    total_len: torch.Tensor  # tokens known, sampled ones included, int32 [R + 1]
    prompt_len: torch.Tensor  # int32 [R + 1]


@dataclass(frozen=True, slots=True)
class OptionRows:
    """A step's rows of logits and what their slots ask for. A table that no request of the batch uses is None.

    options: int32 [R + 1, NUM_OPTIONS]; the first three columns are float32 in the same bits.
    seen: times the output holds each id, plus `IN_PROMPT` if the prompt does, int32 [rows, vocab_size].
    seen_bits: bit id % 32 of word id // 32 is set where `seen` is not 0, int32 [rows, words]; stride as of `seen`.
    masks: bit id % 32 of word id // 32 is set where the id is allowed, int32 [rows, words].
    entries: pairs of an id (plus `IS_END`) and the float32 bits of its bias, each id once, int32 [rows, columns].
    entry_bits: bit id % 32 of word id // 32 is set where the id has an entry, int32 [rows, words].
    words: columns at which each bad word starts, and where the last one ends; then their tokens; int32 [rows, columns].
    """

    slots: torch.Tensor  # logits row -> slot, int32 [num_logits]
    logits_indices: torch.Tensor  # logits row -> token of the step, int64 [num_logits]
    num_drafts: torch.Tensor  # drafts before the logits row that are not in the history, int32 [num_logits]
    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    history: TokenHistory
    options: torch.Tensor
    seen: torch.Tensor | None
    seen_bits: torch.Tensor | None
    masks: torch.Tensor | None
    entries: torch.Tensor | None
    entry_bits: torch.Tensor | None
    words: torch.Tensor | None
    max_entries: int  # of the batch
    max_words: int  # of the batch
    any_processed: bool  # whether some request wants other log-probabilities than raw ones

    def column(self, column: int) -> torch.Tensor:
        """One option of each logits row, int32 [num_logits]."""
        return self.options[self.slots, column]

    def float_column(self, column: int) -> torch.Tensor:
        """One of the first three options of each logits row, float32 [num_logits]."""
        return self.options.view(torch.float32)[self.slots, column]
