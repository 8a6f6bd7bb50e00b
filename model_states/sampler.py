"""The sampler protocol: what `custom_sampler` receives, and what it must give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from model_states.batch import InputBatch


@dataclass(slots=True)
class SamplerOutput:
    """One sampled id for every logits row, on the device.

    The logprob fields are None when no request of the batch asked; else column 0 is the sampled id and columns
    1.. are the best ids, best first. Rows of requests that did not ask hold anything.
    """

    token_ids: torch.Tensor  # int64 [num_logits]
    failed: torch.Tensor  # bool [num_logits], logits with NaN or with no id allowed
    logprob_token_ids: torch.Tensor | None = None  # int32 [num_logits, n + 1]
    logprob_values: torch.Tensor | None = None  # float32 [num_logits, n + 1]
    sampled_ranks: torch.Tensor | None = None  # int32 [num_logits], from 1


class Sampler(Protocol):
    """Turns logits into ids. A replacement keeps to three rules: no host synchronisation, no dependence of one
    row's result on another row, and the same ids for the same (logits, slot parameters, position).
    """

    def sample(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        """Sample from logits [num_logits, vocab_size]; may overwrite them.

        Row i belongs to slot `batch.expanded_idx_mapping[i]` and to the token at `batch.logits_indices[i]`; the
        id sampled for it will have position `batch.positions[batch.logits_indices[i]] + 1`.
        """


@runtime_checkable
class GraphSampler(Sampler, Protocol):
    """A sampler that can be a part of a step's graph; any other follows the graph of the forward eagerly.

    graph_variants: every name that `graph_variant` may give.
    """

    graph_variants: tuple[str, ...]

    def graph_variant(self, batch: InputBatch) -> str | None:
        """A name for the launches that `sample` makes for this batch; None where no graph can hold them.

        Batches of one name and number of rows have the same launches, which read what differs from device buffers.
        The name comes back as `batch.sampling_variant`, and then decides alone.
        """
