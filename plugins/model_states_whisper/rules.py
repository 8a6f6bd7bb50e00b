"""The rules of transcription as a logits processor: suppressed tokens, and timestamps in pairs that never go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from model_states import LogitsProcessor, LogitsRows, ModelConfig, RequestView
from model_states.staged import StagedTensor
from model_states_whisper.tokens import WhisperTokens

_DEFAULTS: Mapping[str, bool] = {"timestamps": False, "suppress": True}


class _Past(NamedTuple):
    """What the rules ask of a row's tokens since its prompt, each [n, 1]."""

    is_first: torch.Tensor  # nothing was sampled yet
    ends_in_timestamp: torch.Tensor
    ends_in_pair: torch.Tensor  # the one before is a timestamp too, or there is none
    last_timestamp: torch.Tensor  # -1 where there is none


class TranscriptionRules(LogitsProcessor):
    """Asked for as `logits_processors={"whisper": {"timestamps": True}}`.

    suppress (default True): forbid the suppressed ids of the checkpoint. timestamps (default False), for a prompt
    without the no-timestamps token: timestamps come in pairs except before the end, never decrease, the first token
    is one of at most `max_initial_timestamp`, and where all of them together are likelier than any one other token,
    one of them is sampled.
    """

    name: ClassVar[str] = "whisper"

    def __init__(self, config: ModelConfig, tokens: WhisperTokens, vocab_size: int) -> None:
        num_slots, device = config.max_num_reqs + 1, config.device
        self._tokens = tokens
        # Tokens by position, so that a draft that was not accepted is overwritten before it is looked at again.
        self._past = StagedTensor((num_slots, config.max_model_len), torch.int32, device)
        self._rules = StagedTensor((num_slots, 3), torch.int32, device)  # prompt_len, suppress, timestamps
        self._ids = torch.arange(vocab_size, device=device)
        self._places = torch.arange(config.max_model_len, device=device)
        self._suppressed = _mask(tokens.suppressed_ids, vocab_size, device)
        self._first_suppressed = _mask(tokens.first_suppressed_ids, vocab_size, device)

    def validate(self, options: Mapping[str, Any]) -> None:
        """Options: `timestamps` and `suppress`, both true or false."""
        unknown = sorted(set(options) - set(_DEFAULTS))
        if unknown or not all(isinstance(value, bool) for value in options.values()):
            raise ValueError("give timestamps and suppress, each True or False")
        if options.get("timestamps") and self._tokens.first_timestamp_id is None:
            raise ValueError(
                "this checkpoint's generation config names no no_timestamps_token_id; leave them out"
            )

    def add_request(self, slot: int, request: RequestView, options: Mapping[str, Any]) -> None:
        """After a preemption the tokens to prefill hold the output so far, so a resume is no special case."""
        asked = {**_DEFAULTS, **options}
        self._past.stage(slot, 0, np.asarray(request.prefill_token_ids, dtype=np.int32))
        self._rules.stage(slot, 0, [request.prompt_len, asked["suppress"], asked["timestamps"]])

    def apply_staged_writes(self) -> None:
        """One copy and one kernel for each table."""
        self._past.apply()
        self._rules.apply()

    def process(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Forbid in place what the rules forbid."""
        self._past.tensor[rows.slots, rows.positions - 1] = rows.last_token_ids.to(torch.int32)
        prompt_len, suppress, timestamps = self._rules.tensor[rows.slots].unsqueeze(-1).unbind(1)
        past = self._look_back(rows, prompt_len)
        forbidden = (self._suppressed | (self._first_suppressed & past.is_first)) & (suppress > 0)
        if self._tokens.no_timestamps_id is None:
            logits.masked_fill_(forbidden, -torch.inf)
            return
        wanted = timestamps > 0
        logits.masked_fill_(forbidden | (self._out_of_order(past) & wanted), -torch.inf)
        first = self._tokens.no_timestamps_id + 1
        likeliest_text = logits[:, :first].amax(1, keepdim=True)
        is_time = (logits[:, first:].logsumexp(1, keepdim=True) > likeliest_text) & wanted
        logits[:, :first].masked_fill_(is_time, -torch.inf)

    def _look_back(self, rows: LogitsRows, prompt_len: torch.Tensor) -> _Past:
        first = self._tokens.first_timestamp_id
        first = len(self._ids) if first is None else first
        positions = rows.positions[:, None]
        num_sampled = positions - prompt_len
        tokens = self._past.tensor[rows.slots]
        before_last = tokens.gather(1, (positions - 2).clamp(min=0))
        is_time = (tokens >= first) & (self._places >= prompt_len) & (self._places < positions)
        last_place = torch.where(is_time, self._places, -1).amax(1, keepdim=True)
        last_timestamp = torch.where(last_place < 0, -1, tokens.gather(1, last_place.clamp(min=0)))
        return _Past(
            is_first=num_sampled == 0,
            ends_in_timestamp=(num_sampled >= 1) & (rows.last_token_ids[:, None] >= first),
            ends_in_pair=(num_sampled < 2) | (before_last >= first),
            last_timestamp=last_timestamp,
        )

    def _out_of_order(self, past: _Past) -> torch.Tensor:
        """Ids that may not come next, bool [n, vocab_size]."""
        tokens, ids = self._tokens, self._ids
        assert tokens.no_timestamps_id is not None
        first = tokens.no_timestamps_id + 1
        is_time = ids >= first
        opened = past.ends_in_timestamp & ~past.ends_in_pair
        # A pair's second may equal its first; what comes later is later, so that 0.00 is not said again and again.
        earliest = torch.where(opened, past.last_timestamp, past.last_timestamp + 1)
        forbidden = (
            (ids == tokens.no_timestamps_id)
            | (is_time & past.ends_in_timestamp & past.ends_in_pair)
            | ((ids < tokens.end_id) & opened)
            | (is_time & (ids < earliest))
            | (~is_time & past.is_first)
        )
        if tokens.max_initial_timestamp is not None:
            forbidden |= past.is_first & (ids > first + tokens.max_initial_timestamp)
        return forbidden


def _mask(ids: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[[token for token in ids if 0 <= token < vocab_size]] = True
    return mask.to(device)
