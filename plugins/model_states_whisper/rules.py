"""The rules of transcription as a logits processor, and as a sampler of the likeliest token that they allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from model_states import InputBatch, LogitsProcessor, LogitsRows, ModelConfig, RequestView, SamplerOutput
from model_states.sampler import GraphSampler, Sampler
from model_states.staged import StagedTensor
from model_states.staged_writer import StagedWriter
from model_states_whisper.kernels.choose_token import (
    ALWAYS,
    AT_FIRST,
    Choice,
    ChoiceRows,
    ChoiceRules,
    allowed_torch,
    choose_token,
)
from model_states_whisper.tokens import WhisperTokens

_SWITCHES: Mapping[str, bool] = {"timestamps": False, "suppress": True, "greedy": False}


class TranscriptionRules(LogitsProcessor):
    """Asked for as `logits_processors={"whisper": {"timestamps": True}}`.

    suppress (default True): forbid the suppressed ids of the checkpoint. timestamps (default False), for a prompt
    without the no-timestamps token: timestamps come in pairs except before the end, never decrease, the first token
    is one of at most `max_initial_timestamp`, and where all of them together are likelier than any one other token,
    one of them is sampled. greedy (default False): take the likeliest token that is left and nothing else, whatever
    the sampling parameters say; its log-probability is that under the rules. See `GreedyTranscription`. only: the one
    id that is allowed, or None; among greedy rows its log-probability is that before all rules.
    """

    name: ClassVar[str] = "whisper"

    def __init__(self, config: ModelConfig, tokens: WhisperTokens, vocab_size: int) -> None:
        num_slots, device = config.max_num_reqs + 1, config.device
        self._tokens = tokens
        self._writer = StagedWriter(device)
        # Tokens by position, so that a draft that was not accepted is overwritten before it is looked at again.
        self._past = StagedTensor((num_slots, config.max_model_len), torch.int32, device, writer=self._writer)
        # prompt_len, suppress, timestamps, and the one id or -1.
        self._rules = StagedTensor((num_slots, 4), torch.int32, device, writer=self._writer)
        self._greedy_np = np.zeros(num_slots, dtype=np.bool_)
        first = tokens.first_timestamp_id
        self._choice = ChoiceRules(
            past=self._past.tensor,
            rules=self._rules.tensor,
            flags=_flags(tokens, vocab_size).to(device),
            vocab_size=vocab_size,
            first_timestamp=vocab_size if first is None else first,
            end_id=tokens.end_id,
            most_initial=tokens.max_initial_timestamp,
        )

    def validate(self, options: Mapping[str, Any]) -> None:
        """Options: `timestamps`, `suppress` and `greedy`, all true or false, and `only`, an id or None."""
        switches = {name: value for name, value in options.items() if name != "only"}
        if switches.keys() - _SWITCHES.keys() or not all(
            isinstance(value, bool) for value in switches.values()
        ):
            raise ValueError("give timestamps, suppress and greedy, each True or False, and only, an id")
        only, vocab_size = options.get("only"), self._choice.vocab_size
        is_id = isinstance(only, int) and not isinstance(only, bool) and 0 <= only < vocab_size
        if only is not None and not is_id:
            raise ValueError(
                f"only={only!r} must be one of the {vocab_size} ids of this model, or be left out"
            )
        if options.get("timestamps") and self._tokens.first_timestamp_id is None:
            raise ValueError(
                "this checkpoint's generation config names no no_timestamps_token_id; leave them out"
            )

    def add_request(self, slot: int, request: RequestView, options: Mapping[str, Any]) -> None:
        """After a preemption the tokens to prefill hold the output so far, so a resume is no special case."""
        asked, only = {**_SWITCHES, **options}, options.get("only")
        self._past.stage(slot, 0, np.asarray(request.prefill_token_ids, dtype=np.int32))
        row = [request.prompt_len, asked["suppress"], asked["timestamps"], -1 if only is None else only]
        self._rules.stage(slot, 0, row)
        self._greedy_np[slot] = asked["greedy"]

    def remove_request(self, slot: int) -> None:
        """The slot is nobody's."""
        self._greedy_np[slot] = False

    def apply_staged_writes(self) -> None:
        """One copy and one kernel."""
        self._past.apply()
        self._rules.apply()
        self._writer.flush()

    def process(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Forbid in place what the rules forbid."""
        indices = torch.arange(len(logits), device=logits.device)
        own = ChoiceRows(rows.slots, indices, rows.positions - 1, rows.last_token_ids)
        logits.masked_fill_(~allowed_torch(logits, self._choice, own), -torch.inf)

    def are_greedy(self, batch: InputBatch) -> bool:
        """Whether every row of the step samples, and is to take the likeliest token."""
        every = batch.num_logits == batch.num_reqs > 0 and batch.grammar_mask is None
        return every and bool(self._greedy_np[batch.idx_mapping_np].all())

    def choose(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        """The likeliest token of every row, with its log-probability. A graph may hold it for any such rows."""
        num_rows = len(logits)
        choice = Choice(
            token_ids=logits.new_empty(num_rows, dtype=torch.int64),
            failed=logits.new_empty(num_rows, dtype=torch.bool),
            values=logits.new_empty(num_rows, dtype=torch.float32),
        )
        rows = ChoiceRows(
            batch.expanded_idx_mapping[:num_rows],
            batch.logits_indices[:num_rows],
            batch.positions,
            batch.input_ids,
        )
        choose_token(logits, self._choice, rows, choice)
        return SamplerOutput(
            token_ids=choice.token_ids,
            failed=choice.failed,
            logprob_token_ids=choice.token_ids.to(torch.int32)[:, None],
            logprob_values=choice.values[:, None],
            sampled_ranks=torch.ones_like(choice.token_ids, dtype=torch.int32),
        )


class GreedyTranscription:
    """A sampler for steps in which every row asks for the option `greedy`: one kernel, which a step's graph holds.

    Any other step is the sampler's that it wraps.
    """

    _NAME: ClassVar[str] = "transcription"

    def __init__(self, sampler: Sampler, rules: TranscriptionRules) -> None:
        self._sampler, self._rules = sampler, rules
        others = sampler.graph_variants if isinstance(sampler, GraphSampler) else ()
        self.graph_variants = (*others, self._NAME)

    def sample(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        """See `Sampler.sample`."""
        variant = batch.sampling_variant
        is_own = self._rules.are_greedy(batch) if variant is None else variant == self._NAME
        return self._rules.choose(logits, batch) if is_own else self._sampler.sample(logits, batch)

    def graph_variant(self, batch: InputBatch) -> str | None:
        """See `GraphSampler.graph_variant`."""
        if self._rules.are_greedy(batch):
            return self._NAME
        return self._sampler.graph_variant(batch) if isinstance(self._sampler, GraphSampler) else None


def _flags(tokens: WhisperTokens, vocab_size: int) -> torch.Tensor:
    flags = torch.zeros(vocab_size, dtype=torch.uint8)
    for ids, bit in ((tokens.suppressed_ids, ALWAYS), (tokens.first_suppressed_ids, AT_FIRST)):
        flags[[token for token in ids if 0 <= token < vocab_size]] += bit
    return flags
