"""A random scheduler and a naive model of each request, for tests of input preparation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from core_runner.block_tables import BlockTables
from core_runner.input_batch import InputPreparer
from core_runner.kernels import (
    expand_idx_mapping,
    gather_block_tables,
    merge_tokens,
    positions,
    post_update,
    prefill_tokens,
    slot_mapping,
)
from core_runner.request_states import RequestStates
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import BlockUpdate, NewRequest, RemovedRequest, SchedulerOutput
from model_states.batch import InputBatch

R, L, T = 5, 40, 24
GROUPS = [(16, None), (4, 8)]
INPUT_KERNELS = (
    expand_idx_mapping,
    gather_block_tables,
    merge_tokens,
    positions,
    post_update,
    prefill_tokens,
    slot_mapping,
)


def ints(values: Any = ()) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(list(values), dtype=np.int32)


@dataclass
class Naive:
    """One request as a person would keep it: lists, and what the host believes beside what is true."""

    slot: int
    prefill: list[int]
    tokens: list[int]  # every token known
    computed: int  # the truth
    upper_bound: int  # what the scheduler knows one step later
    blocks: list[list[int]]  # per group
    drafts: list[int] = field(default_factory=list)


class World:
    """A random scheduler, the objects under test, and the naive model of what they should hold."""

    def __init__(self, device: torch.device, num_drafts: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.device, self.num_drafts = device, num_drafts
        self.states = RequestStates(R, L, num_drafts, device, poison=True)
        self.tables = BlockTables(GROUPS, R, L, device, num_blocks=[5000, 5000], poison=True)
        self.preparer = InputPreparer(self.states, self.tables, T, device)
        self.live: dict[int, Naive] = {}
        self.removed: list[RemovedRequest] = []
        self.new: list[NewRequest] = []
        self.unread: dict[int, int] = {}  # slot -> rejected drafts of a step that the host has not read

    def random_ids(self, count: int) -> list[int]:
        return self.rng.integers(1, 5000, count).tolist()

    def remove(self, slot: int) -> None:
        self.removed.append(RemovedRequest(slot, "finished"))
        del self.live[slot]
        self.unread.pop(slot, None)

    def admit(self, slot: int) -> None:
        ids = self.random_ids(int(self.rng.integers(1, 30)))
        computed = int(self.rng.integers(0, len(ids)))
        prompt_len = int(self.rng.integers(0, len(ids) + 1))
        self.new.append(
            NewRequest(f"r{slot}", slot, ids, prompt_len, SamplingParams(), 0, num_computed_tokens=computed)
        )
        self.live[slot] = Naive(slot, ids, list(ids), computed, computed, [[] for _ in GROUPS])

    def change_requests(self) -> None:
        for request in list(self.live.values()):
            if request.upper_bound + 1 + self.num_drafts > L or self.rng.random() < 0.08:
                self.remove(request.slot)
        for slot in range(R):
            if slot not in self.live and self.rng.random() < 0.4:
                self.admit(slot)

    def next_step(self) -> SchedulerOutput:
        """Change who is live, pick rows, and give each row blocks for its upper bound."""
        self.removed, self.new = [], []
        self.change_requests()
        rows, scheduled, drafts, budget = [], [], [], T
        for slot in self.rng.permutation(sorted(self.live)).tolist():
            request = self.live[slot]
            left, num_drafts = len(request.prefill) - request.upper_bound, 0
            if left > 0:
                count = int(self.rng.integers(1, left + 1))
            else:
                num_drafts = int(self.rng.integers(0, self.num_drafts + 1))
                count = 1 + num_drafts
            if count <= budget and self.rng.random() < 0.8:
                budget -= count
                rows.append(request)
                scheduled.append(count)
                drafts.append(num_drafts)
        return SchedulerOutput(
            removed=self.removed,
            new_requests=self.new,
            block_updates=[self.grow(group, size, rows, scheduled) for group, (size, _) in enumerate(GROUPS)],
            slots=ints(request.slot for request in rows),
            num_scheduled_tokens=ints(scheduled),
            num_computed_tokens=ints(request.upper_bound for request in rows),
            num_draft_tokens=ints(drafts) if self.num_drafts else None,
        )

    def grow(self, group: int, block_size: int, rows: list[Naive], scheduled: list[int]) -> BlockUpdate:
        slots, starts, lengths, ids = [], [], [], []
        for request, count in zip(rows, scheduled, strict=True):
            row = request.blocks[group]
            fresh = self.random_ids(max(-(-(request.upper_bound + count) // block_size) - len(row), 0))
            slots, starts, lengths = [*slots, request.slot], [*starts, len(row)], [*lengths, len(fresh)]
            ids += fresh
            row += fresh
        return BlockUpdate(ints(slots), ints(starts), ints(lengths), ints(ids))

    def apply(self, step: SchedulerOutput) -> None:
        """What the runner does between `validate` and `prepare`."""
        for removed in step.removed:
            self.states.remove(removed.slot)
            self.tables.remove(removed.slot)
        for new in step.new_requests:
            self.states.add(new)
        for group, update in enumerate(step.block_updates):
            self.tables.apply_update(group, update)
        self.states.apply_staged_writes()
        self.tables.apply_staged_writes()

    def sample(self, step: SchedulerOutput, batch: InputBatch) -> None:
        """Draw the step's outcome on the device's side; the host learns of it after it built the next step."""
        token_ids, num_sampled, num_rejected = [], [], []
        for row, request in enumerate(self.live[slot] for slot in step.slots.tolist()):
            num_logits = int(np.diff(batch.cu_num_logits_np)[row])
            drafts = max(num_logits - 1, 0)
            accepted = int(self.rng.integers(0, drafts + 1))
            emitted = request.drafts[:accepted] + self.random_ids(1) if num_logits else []
            token_ids += emitted + [-5] * (num_logits - len(emitted))
            num_sampled.append(len(emitted))
            num_rejected.append(drafts - accepted)
            request.tokens += emitted
            request.computed += int(step.num_scheduled_tokens[row]) - (drafts - accepted)
        device_ints = [
            torch.tensor(a, dtype=torch.int32, device=self.device) for a in (num_sampled, num_rejected)
        ]
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        self.preparer.post_update(batch, ids, *device_ints)
        self.propose()
        self.learn(step, num_rejected)

    def propose(self) -> None:
        """The drafter's part: it writes the draft columns on the device."""
        for request in self.live.values():
            request.drafts = self.random_ids(self.num_drafts)
            if self.num_drafts:
                drafts = torch.tensor(request.drafts, dtype=torch.int32, device=self.device)
                self.states.draft_tokens[request.slot] = drafts

    def learn(self, step: SchedulerOutput, num_rejected: list[int]) -> None:
        """The host counts this step as if every draft were accepted, and reads the step before it."""
        for slot, rejected in self.unread.items():
            self.live[slot].upper_bound -= rejected
        self.unread = dict(zip(step.slots.tolist(), num_rejected, strict=True))
        for slot, count in zip(step.slots.tolist(), step.num_scheduled_tokens.tolist(), strict=True):
            self.live[slot].upper_bound += count

    def check_batch(self, step: SchedulerOutput, batch: InputBatch) -> None:
        ids, where, slots_of_logits, indices, local = [], [], [], [], []
        seq_lens, mappings, first = [], [[] for _ in GROUPS], 0
        for row, request in enumerate(self.live[slot] for slot in step.slots.tolist()):
            count = int(step.num_scheduled_tokens[row])
            span = range(request.computed, request.computed + count)
            known = request.tokens + request.drafts
            ids += [known[p] for p in span]
            where += span
            seq_lens.append(request.computed + count)
            for group, (size, _) in enumerate(GROUPS):
                row_blocks = request.blocks[group]
                mappings[group] += [row_blocks[p // size] * size + p % size for p in span]
                table = batch.block_tables[group][row].tolist()
                assert table == row_blocks + [0] * (len(table) - len(row_blocks))
            in_decode = request.computed >= len(request.prefill)
            samples = in_decode or span.stop == len(request.prefill)
            num_logits = (count if in_decode else 1) if samples else 0
            slots_of_logits += [request.slot] * num_logits
            local += range(num_logits)
            indices += range(first + count - num_logits, first + count)
            first += count
        pad_tokens, pad_rows = batch.input_ids.numel() - first, batch.seq_lens.numel() - step.num_reqs
        assert batch.input_ids.tolist() == ids + [0] * pad_tokens
        assert batch.positions.tolist() == where + [0] * pad_tokens
        assert batch.seq_lens.tolist() == seq_lens + [0] * pad_rows
        assert batch.idx_mapping.tolist() == step.slots.tolist() + [R] * pad_rows
        starts = [0, *np.cumsum(step.num_scheduled_tokens).tolist()]
        assert batch.query_start_loc.tolist() == starts + starts[-1:] * pad_rows
        assert batch.query_start_loc_np.tolist() == starts
        for group, mapping in enumerate(batch.slot_mappings):
            assert mapping.tolist() == mappings[group] + [-1] * pad_tokens
            assert not batch.block_tables[group][step.num_reqs :].any()
        pad_logits = len(batch.logits_indices) - len(indices)
        assert pad_logits >= 0
        assert batch.num_logits == len(indices)
        assert batch.expanded_idx_mapping.tolist() == slots_of_logits + [R] * pad_logits
        assert batch.expanded_local_pos.tolist() == local + [0] * pad_logits
        assert batch.logits_indices.tolist() == indices + [0] * pad_logits
        assert batch.cu_num_logits.tolist()[step.num_reqs :] == [len(indices)] * (pad_rows + 1)
        assert batch.max_seq_len >= max(seq_lens, default=0)
        assert (batch.num_tokens, batch.num_logits) == (first, len(indices))

    def check_states(self) -> None:
        for slot, request in self.live.items():
            assert self.states.all_token_ids[slot, : len(request.tokens)].tolist() == request.tokens[:L]
            assert self.states.total_len[slot].item() == min(len(request.tokens), L)
            assert self.states.num_computed_tokens[slot].item() == request.computed
            assert self.states.last_sampled_tokens[slot].item() == request.tokens[-1]
        for array in (self.states.all_token_ids, self.states.total_len, self.states.num_computed_tokens):
            assert not array[R].any()


def run_world(world: World, num_steps: int) -> None:
    for index in range(num_steps):
        step = world.next_step()
        world.preparer.validate(step)
        world.apply(step)
        # Every third step has its real sizes; the others are padded, once to the very end of the buffers.
        num_tokens, num_rows = step.total_num_tokens, step.num_reqs
        padded = (None, None) if index % 3 == 0 else (min(num_tokens + 5, T), min(num_rows + 2, R))
        padded = (T, R) if index % 3 == 2 else padded
        batch = world.preparer.prepare(step, *padded)
        world.check_batch(step, batch)
        if step.num_reqs:
            world.sample(step, batch)
        world.check_states()
