"""`DefaultSampler`: greedy and seeded sampling with top-k, top-p, min-p and log-probabilities."""

from __future__ import annotations

import torch

from core_runner.sampling.kernels.gumbel_argmax import gumbel_argmax
from core_runner.sampling.kernels.logprobs import logprobs
from core_runner.sampling.kernels.noise import TARGET
from core_runner.sampling.kernels.top_k_top_p import top_k_top_p
from core_runner.sampling.rows import SamplingRows
from core_runner.sampling.states import SamplerStates
from model_states.batch import InputBatch
from model_states.sampler import SamplerOutput


class DefaultSampler:
    """The `Sampler` of the core. A feature that no request of the batch asks for launches nothing.

    states: parameters of every slot. vocab_size: ids that may be sampled; logits may have padding columns
    after them, which are never read.
    """

    def __init__(self, states: SamplerStates, vocab_size: int) -> None:
        self.states = states
        self.vocab_size = vocab_size

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
        if num_logits:
            rows = self.states.rows(batch, num_logits)
            thresholds = self._thresholds(logits, rows, batch)
            gumbel_argmax(logits, self.vocab_size, rows, TARGET, thresholds, output.token_ids, output.failed)
        # Asked of the host's mirrors: reading the device here would wait for it.
        num_logprobs = int(self.states.num_logprobs_np[batch.idx_mapping_np].max(initial=-1))
        if num_logprobs >= 0:
            self._add_logprobs(logits, num_logprobs, output)
        return output

    def _thresholds(self, logits: torch.Tensor, rows: SamplingRows, batch: InputBatch) -> torch.Tensor | None:
        if not self.states.filters_np[batch.idx_mapping_np].any():
            return None
        thresholds = logits.new_empty(logits.shape[0], dtype=torch.float32)
        top_k_top_p(logits, self.vocab_size, rows, thresholds)
        return thresholds

    def _add_logprobs(self, logits: torch.Tensor, num_logprobs: int, output: SamplerOutput) -> None:
        """Column 0 is the sampled id, then the best ids, best first."""
        best = logits[:, : self.vocab_size].topk(min(num_logprobs, self.vocab_size), dim=1).indices
        ids = torch.cat([output.token_ids[:, None], best], dim=1).to(torch.int32)
        output.logprob_token_ids = ids
        output.logprob_values = logits.new_empty(ids.shape, dtype=torch.float32)
        output.sampled_ranks = logits.new_empty(ids.shape[0], dtype=torch.int32)
        if ids.shape[0]:
            logprobs(logits, self.vocab_size, ids, output.logprob_values, output.sampled_ranks)
