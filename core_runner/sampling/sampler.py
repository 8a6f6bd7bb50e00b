"""`DefaultSampler`: greedy and seeded sampling with top-k, top-p, min-p and log-probabilities."""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.bad_words import bad_words
from core_runner.sampling.kernels.grammar_mask import grammar_mask
from core_runner.sampling.kernels.gumbel_argmax import gumbel_argmax
from core_runner.sampling.kernels.logit_entries import logit_entries
from core_runner.sampling.kernels.logprobs import logprobs
from core_runner.sampling.kernels.noise import TARGET
from core_runner.sampling.kernels.penalties import count_tokens
from core_runner.sampling.kernels.processed_logits import processed_logits
from core_runner.sampling.kernels.top_k_top_p import top_k_top_p
from core_runner.sampling.kernels.working_logits import working_logits
from core_runner.sampling.option_rows import PROCESSED, OptionRows
from core_runner.sampling.rows import SamplingRows
from core_runner.sampling.slot_processors import SlotProcessors
from core_runner.sampling.states import SamplerStates
from model_states.batch import GrammarMask, InputBatch
from model_states.sampler import SamplerOutput


class DefaultSampler:
    """The `Sampler` of the core. A feature that no request of the batch asks for launches nothing.

    states: parameters of every slot. vocab_size: ids that may be sampled; logits may have padding columns
    after them, which are never read. processors: what plugins brought to change logits, None for nothing.
    """

    def __init__(
        self, states: SamplerStates, vocab_size: int, processors: SlotProcessors | None = None
    ) -> None:
        self.states = states
        self.vocab_size = vocab_size
        self.processors = processors

    def sample(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        """Sample one id for each row of logits [num_logits, >= vocab_size] (float32, bfloat16 or float16).

        The logits are not changed. Nothing waits for the device. The two logprob fields have
        1 + min(n, vocab_size) columns, n being the largest count asked for in the batch.
        """
        if logits.stride(-1) != 1:  # kernels take any stride of rows, but columns side by side
            logits = logits.contiguous()
        num_logits = logits.shape[0]
        output = SamplerOutput(
            token_ids=logits.new_empty(num_logits, dtype=torch.int64),
            failed=logits.new_empty(num_logits, dtype=torch.bool),
        )
        rows = self.states.rows(batch, num_logits)
        if batch.sampling_variant is not None:
            self._choose(logits, rows, batch.sampling_variant == "filtered", output)
            return output
        options, adjusted = self._options(batch, num_logits), logits
        if num_logits:
            if options is not None:
                adjusted = self._adjust(logits, batch, options)
            if batch.grammar_mask is not None:
                adjusted = self._mask(logits, adjusted, batch.grammar_mask)
            if self.processors is not None:
                adjusted = self.processors.apply(logits, adjusted, batch)
            filters = bool(self.states.filters_np[batch.idx_mapping_np].any())
            thresholds = self._choose(adjusted, rows, filters, output)
            if options is not None and options.any_processed:
                processed_logits(options, rows.temperature, thresholds, adjusted)
        self._add_logprobs(logits, adjusted, batch, options, output)
        return output

    def graph_variant(self, batch: InputBatch) -> str | None:
        """Which launches `sample` makes, where they depend on the number of rows alone; None for rarer options."""
        slots = batch.idx_mapping_np
        if self.states.num_logprobs_np[slots].max(initial=-1) >= 0 or self._options(batch, 0) is not None:
            return None
        if self.processors is not None and self.processors.are_wanted(slots):
            return None
        return "filtered" if self.states.filters_np[slots].any() else "plain"

    def _options(self, batch: InputBatch, num_logits: int) -> OptionRows | None:
        held = self.states.logit_options
        return None if held is None else held.rows(batch, num_logits)

    def _adjust(self, logits: torch.Tensor, batch: InputBatch, options: OptionRows) -> torch.Tensor:
        """A float32 copy of the logits [num_logits, vocab_size], changed as the slots of the rows ask."""
        if options.seen is not None:
            count_tokens(batch.idx_mapping, options.options, options.seen, options.history)
        out = logits.new_empty((logits.shape[0], self.vocab_size), dtype=torch.float32)
        working_logits(logits, self.vocab_size, options, out)
        if options.entries is not None:
            logit_entries(logits, options, out)
        if options.words is not None:
            bad_words(options, out)
        return out

    def _mask(self, logits: torch.Tensor, adjusted: torch.Tensor, mask: GrammarMask) -> torch.Tensor:
        """Forbid what grammars forbid, in the working copy, which is made if there is none yet.

        First or last is the same: what is -inf stays so under every bias and penalty.
        """
        if adjusted is logits:
            adjusted = logits[:, : self.vocab_size].to(torch.float32, copy=True)
        grammar_mask(adjusted, self.vocab_size, mask.rows, mask.words)
        return adjusted

    def _choose(
        self, logits: torch.Tensor, rows: SamplingRows, filters: bool, output: SamplerOutput
    ) -> torch.Tensor | None:
        """Write the ids of all rows; returns the least logit that a row may choose, None if nothing filters."""
        thresholds = None
        if filters:
            thresholds = logits.new_empty(logits.shape[0], dtype=torch.float32)
            top_k_top_p(logits, self.vocab_size, rows, thresholds)
        gumbel_argmax(logits, self.vocab_size, rows, TARGET, thresholds, output.token_ids, output.failed)
        return thresholds

    def _add_logprobs(
        self,
        logits: torch.Tensor,
        processed: torch.Tensor,
        batch: InputBatch,
        options: OptionRows | None,
        output: SamplerOutput,
    ) -> None:
        # Asked of the host's mirrors: reading the device here would wait for it.
        num_logprobs = int(self.states.num_logprobs_np[batch.idx_mapping_np].max(initial=-1))
        if num_logprobs < 0:
            return
        wants_processed = options is not None and options.any_processed
        parts = self._logprobs(processed if wants_processed else logits, num_logprobs, output.token_ids)
        if options is not None and wants_processed and self.states.wants_raw_np[batch.idx_mapping_np].any():
            is_processed = options.column(PROCESSED) > 0
            raw = self._logprobs(logits, num_logprobs, output.token_ids)
            shapes = (is_processed[:, None], is_processed[:, None], is_processed)
            parts = tuple(map(torch.where, shapes, parts, raw))
        output.logprob_token_ids, output.logprob_values, output.sampled_ranks = parts

    def _logprobs(
        self, logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Ids, values and ranks; column 0 is the sampled id, then the best ids, best first."""
        best = logits[:, : self.vocab_size].topk(min(num_logprobs, self.vocab_size), dim=1).indices
        ids = torch.cat([token_ids[:, None], best], dim=1).to(torch.int32)
        values = logits.new_empty(ids.shape, dtype=torch.float32)
        ranks = logits.new_empty(ids.shape[0], dtype=torch.int32)
        if ids.shape[0]:
            logprobs(logits, self.vocab_size, ids, values, ranks)
        return ids, values, ranks
