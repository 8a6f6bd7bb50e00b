"""`DefaultSampler`: greedy and seeded sampling with top-k, top-p, min-p and log-probabilities."""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.bad_words import bad_words
from core_runner.sampling.kernels.best_ids import best_ids
from core_runner.sampling.kernels.grammar_mask import grammar_mask
from core_runner.sampling.kernels.group_maxima import group_maxima
from core_runner.sampling.kernels.groups import Groups, new_groups
from core_runner.sampling.kernels.gumbel_argmax import gumbel_argmax
from core_runner.sampling.kernels.ladder import new_ladder
from core_runner.sampling.kernels.logit_entries import logit_entries
from core_runner.sampling.kernels.logprobs import logprobs
from core_runner.sampling.kernels.noise import TARGET
from core_runner.sampling.kernels.nucleus import nucleus
from core_runner.sampling.kernels.overlay import Overlay
from core_runner.sampling.kernels.penalties import count_tokens, penalized_values
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

    graph_variants = ("plain", "filtered")

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
        options, adjusted, groups = self._options(batch, num_logits), logits, None
        overlay = None
        if num_logits:
            if options is not None:
                overlay = self._lay_over(logits, batch, options)
                if self._needs_copy(batch, options):
                    adjusted, overlay = self._copy(logits, overlay), None
            if batch.grammar_mask is not None:
                adjusted = self._mask(logits, adjusted, batch.grammar_mask)
            if self.processors is not None:
                adjusted = self.processors.apply(logits, adjusted, batch)
            filters = bool(self.states.filters_np[batch.idx_mapping_np].any())
            is_raw = options is None and adjusted is logits
            wants_best = is_raw and bool((self.states.num_logprobs_np[batch.idx_mapping_np] > 0).any())
            groups = self._choose(adjusted, rows, filters, output, overlay, wants_best)
            if options is not None and options.any_processed:
                self._process(adjusted, rows, options, groups if filters else None, output.token_ids)
            if not is_raw:
                groups = None
        self._add_logprobs(logits, adjusted, batch, rows, options, groups, output)
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

    def _lay_over(self, logits: torch.Tensor, batch: InputBatch, options: OptionRows) -> Overlay:
        """What penalties, bias, forbidden ids and minimum length make of the logits of the ids that they concern."""
        has_values = options.seen is not None or options.entries is not None
        columns = self.vocab_size if has_values else 0
        out = logits.new_empty((logits.shape[0], columns), dtype=torch.float32)
        if options.seen is not None and options.seen_bits is not None:
            count_tokens(batch.idx_mapping, options.options, options.seen, options.seen_bits, options.history)
            penalized_values(logits, self.vocab_size, options, out)
        if options.entries is not None:
            logit_entries(logits, options, out)
        return Overlay(out, options)

    def _needs_copy(self, batch: InputBatch, options: OptionRows) -> bool:
        """Whether something changes logits that an overlay does not hold."""
        if options.words is not None or options.any_processed or batch.grammar_mask is not None:
            return True
        return self.processors is not None and self.processors.are_wanted(batch.idx_mapping_np)

    def _copy(self, logits: torch.Tensor, overlay: Overlay) -> torch.Tensor:
        """A float32 copy of the logits [num_logits, vocab_size], changed as the slots of the rows ask."""
        out, rows = overlay
        if not out.numel():
            out = logits.new_empty((logits.shape[0], self.vocab_size), dtype=torch.float32)
        working_logits(logits, self.vocab_size, Overlay(out, rows))
        if rows.words is not None:
            bad_words(rows, out)
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
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        filters: bool,
        output: SamplerOutput,
        overlay: Overlay | None = None,
        maxima: bool = False,
    ) -> Groups:
        """Write the ids of all rows; returns what a pass over the logits left of each group of ids.

        filters: whether some row has top-k, top-p or min-p. Everything else is read on the device, so a CUDA
        graph may record either case for any requests. maxima: whether those of groups are returned in any case.
        """
        num_rows, vocab_size = logits.shape[0], self.vocab_size
        groups = new_groups(logits, vocab_size, filters, maxima)
        group_maxima(logits, vocab_size, rows, TARGET, groups, overlay)
        ids, ladder = output.token_ids, new_ladder(num_rows, logits.device) if filters else None
        gumbel_argmax(logits, vocab_size, rows, TARGET, groups, ids, output.failed, ladder, overlay)
        if ladder is not None:
            nucleus(logits, vocab_size, rows, TARGET, groups, ladder, ids, overlay)
        return groups

    def _process(
        self,
        adjusted: torch.Tensor,
        rows: SamplingRows,
        options: OptionRows,
        groups: Groups | None,
        token_ids: torch.Tensor,
    ) -> None:
        """Make `adjusted` the distribution that was sampled from, in rows that want its log-probabilities.

        groups: of `adjusted`, None where no row filters.
        """
        thresholds = None
        if groups is not None:
            thresholds = adjusted.new_empty(len(adjusted), dtype=torch.float32)
            top_k_top_p(adjusted, self.vocab_size, rows, groups, True, thresholds)
            # Sampling does without top-p's threshold, and sums masses in another order.
            torch.minimum(thresholds, adjusted.gather(1, token_ids[:, None])[:, 0], out=thresholds)
        processed_logits(options, rows.temperature, thresholds, adjusted)

    def _add_logprobs(
        self,
        logits: torch.Tensor,
        processed: torch.Tensor,
        batch: InputBatch,
        rows: SamplingRows,
        options: OptionRows | None,
        groups: Groups | None,
        output: SamplerOutput,
    ) -> None:
        """groups: of `logits`, if there are any."""
        # Asked of the host's mirrors: reading the device here would wait for it.
        num_logprobs = int(self.states.num_logprobs_np[batch.idx_mapping_np].max(initial=-1))
        if num_logprobs < 0:
            return
        wants_processed = options is not None and options.any_processed
        chosen = (processed, None) if wants_processed else (logits, groups)
        parts = self._logprobs(*chosen, rows, num_logprobs, output.token_ids)
        if options is not None and wants_processed and self.states.wants_raw_np[batch.idx_mapping_np].any():
            is_processed = options.column(PROCESSED) > 0
            raw = self._logprobs(logits, groups, rows, num_logprobs, output.token_ids)
            shapes = (is_processed[:, None], is_processed[:, None], is_processed)
            parts = tuple(map(torch.where, shapes, parts, raw))
        output.logprob_token_ids, output.logprob_values, output.sampled_ranks = parts

    def _logprobs(
        self,
        logits: torch.Tensor,
        groups: Groups | None,
        rows: SamplingRows,
        num_logprobs: int,
        token_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Ids, values and ranks; column 0 is the sampled id, then the best ids, best first."""
        num_best = min(num_logprobs, self.vocab_size)
        ids = logits.new_empty((len(logits), 1 + num_best), dtype=torch.int32)
        values = torch.empty_like(ids, dtype=torch.float32)
        ranks = logits.new_empty(len(logits), dtype=torch.int32)
        if len(logits):
            ids[:, 0] = token_ids
            if num_best:
                if groups is None:
                    groups = new_groups(logits, self.vocab_size, False, maxima=True)
                    group_maxima(logits, self.vocab_size, rows, TARGET, groups)
                assert groups.maxima is not None
                best_ids(logits, self.vocab_size, groups.maxima, ids[:, 1:])
            logprobs(logits, self.vocab_size, ids, values, ranks)
        return ids, values, ranks
