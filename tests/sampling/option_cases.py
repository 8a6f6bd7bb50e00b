"""Requests with a past, drafts among it, as the sampler sees them in one step: their batch, their slots' tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from sampling_reference import GARBAGE, adjusted_logits

from core_runner.sampling.logit_options import LogitOptions
from core_runner.sampling.option_rows import TokenHistory
from core_runner.sampling.sampler import DefaultSampler
from core_runner.sampling.states import SamplerStates
from core_runner.sampling_params import SamplingParams
from model_states.batch import InputBatch

MAX_LEN = 64


@dataclass
class Case:
    """One request of a step: drafts follow its known tokens, and each has a row of logits of its own."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int] = ()
    drafts: Sequence[int] = ()
    seed: int = 0

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


@dataclass
class World:
    """Slots with their histories. Case i of `cases` has slot `slots[i]`; the others hold garbage."""

    cases: Sequence[Case]
    vocab_size: int
    device: torch.device
    eos_token_ids: Sequence[int] = ()
    num_spare_slots: int = 2
    slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        num_slots = len(self.cases) + self.num_spare_slots
        self.slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5)).tolist()
        tokens = torch.full((num_slots + 1, MAX_LEN), GARBAGE, dtype=torch.int32)
        total, prompts = torch.full((2, num_slots + 1), GARBAGE, dtype=torch.int32)
        for slot, case in zip(self.slots, self.cases, strict=False):
            tokens[slot, : len(case.tokens)] = torch.tensor(case.tokens, dtype=torch.int32)
            total[slot], prompts[slot] = len(case.tokens), len(case.prompt)
        self.history = TokenHistory(tokens.to(self.device), total.to(self.device), prompts.to(self.device))
        self.options = LogitOptions(num_slots, self.vocab_size, self.history, self.eos_token_ids, self.device)
        self.states = SamplerStates(num_slots, self.device, self.options)
        for slot, case in zip(self.slots, self.cases, strict=False):
            self.states.add(slot, case.params, case.seed)
        self.states.apply_staged_writes()
        self.sampler = DefaultSampler(self.states, self.vocab_size)

    @property
    def num_logits(self) -> int:
        return sum(1 + len(case.drafts) for case in self.cases)

    def batch(self) -> InputBatch:
        """The step, with tokens before each row's last known one that are nobody's business."""
        counts = np.array([1 + len(case.drafts) for case in self.cases], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ids, positions, indices, local = [], [], [], []
        for case in self.cases:
            ids += [GARBAGE, case.tokens[-1], *case.drafts]
            positions += [GARBAGE, *range(len(case.tokens) - 1, len(case.tokens) + len(case.drafts))]
            indices += range(len(ids) - 1 - len(case.drafts), len(ids))
            local += range(1 + len(case.drafts))
        slots = np.array(self.slots[: len(self.cases)], dtype=np.int32)

        def on_device(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        unused = torch.empty(0, dtype=torch.int32)
        query_starts = starts + np.arange(len(starts), dtype=np.int32)
        return InputBatch(
            num_reqs=len(slots),
            num_tokens=len(ids),
            idx_mapping=on_device([*slots, len(self.slots)], torch.int32),  # and one row of padding
            idx_mapping_np=slots,
            num_scheduled_tokens_np=counts + 1,
            num_computed_tokens_np=np.zeros(len(slots), dtype=np.int32),
            query_start_loc=on_device(query_starts, torch.int32),
            query_start_loc_np=query_starts,
            seq_lens=unused,
            input_ids=on_device(ids, torch.int64),
            positions=on_device(positions, torch.int64),
            block_tables=(),
            slot_mappings=(),
            logits_indices=on_device(indices, torch.int64),
            expanded_idx_mapping=on_device(np.repeat(slots, counts), torch.int32),
            expanded_local_pos=on_device(local, torch.int32),
            cu_num_logits=on_device(starts, torch.int32),
            cu_num_logits_np=starts,
            max_query_len=int(counts.max()) + 1,
            max_seq_len=MAX_LEN,
        )

    def rows(self) -> list[tuple[Case, list[int]]]:
        """For each row of logits: its case, and the output that comes before what it samples."""
        return [
            (case, [*case.output, *case.drafts[:count]])
            for case in self.cases
            for count in range(1 + len(case.drafts))
        ]

    def reference(self, logits: torch.Tensor) -> torch.Tensor:
        """What the slow sampler makes of the logits, float64 [num_logits, vocab_size]."""
        rows = zip(logits[:, : self.vocab_size].tolist(), self.rows(), strict=True)
        return torch.tensor(
            [
                adjusted_logits(x, case.params, case.prompt, out, self.eos_token_ids)
                for x, (case, out) in rows
            ],
            dtype=torch.float64,
        )
