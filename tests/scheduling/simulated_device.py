"""A device in plain Python that runs `SchedulerOutput`s and is loud about every broken rule.

Each cache position holds a signature of all tokens up to it (and the salt). Computing a token checks that every
earlier position it can see holds the signature that its own history demands, so a lost, stale, shared or wrongly
hit block is found at once. The next token is a function of the signature: a right stream shows a right cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from core_runner.scheduling.output import Logprobs, ModelRunnerOutput, NewRequest, SchedulerOutput
from core_runner.scheduling.prefix_cache import GroupSpec

VOCAB_SIZE = 97
EOS = 0
MASK = (1 << 61) - 1


def extend(signature: int, token: int) -> int:
    """Signature of a history with one more token."""
    return (signature * 1_000_003 + token * 7919 + 12345) & MASK


def root(salt: str) -> int:
    """Signature of an empty history."""
    return sum(ord(c) * 31**i for i, c in enumerate(salt)) + 17


def next_token(signature: int) -> int:
    """The token that the model samples after a history."""
    return (signature ^ (signature >> 23)) % VOCAB_SIZE


def reference(prompt, salt: str, max_total_len: int, stop_ids=frozenset({EOS})) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that runs alone."""
    signature = root(salt)
    for token in prompt:
        signature = extend(signature, int(token))
    outputs: list[int] = []
    while True:
        outputs.append(next_token(signature))
        if outputs[-1] in stop_ids:
            return outputs, "stop"
        if len(prompt) + len(outputs) >= max_total_len:
            return outputs, "length"
        signature = extend(signature, outputs[-1])


@dataclass
class Row:
    """One slot of the device."""

    new: NewRequest
    history: list[int]
    num_computed: int
    signatures: list[int] = field(default_factory=list)  # of the history's leading tokens


class SimulatedDevice:
    """Slots, block tables and cache contents; `execute` runs one step and returns what it sampled."""

    def __init__(
        self, groups, num_blocks, *, max_num_reqs, budget, max_model_len, num_draft_tokens=0, seed=0
    ):
        self.max_model_len = max_model_len
        self.groups = [GroupSpec(*group) for group in groups]
        self.max_num_reqs, self.budget, self.num_draft_tokens = max_num_reqs, budget, num_draft_tokens
        self.rows: dict[int, Row] = {}
        self.tables = [np.zeros((max_num_reqs, 512), np.int64) for _ in groups]
        self.caches = [
            np.full((n, g.block_size), -1, np.int64) for n, g in zip(num_blocks, self.groups, strict=True)
        ]
        self.fail_ids: set[str] = set()
        self.num_computed_tokens = 0
        self.removed_reasons: list[str] = []
        self.last: SchedulerOutput | None = None
        self._rng = random.Random(seed)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        self._check_repeat(output)
        self._apply_removals(output)
        self._apply_admissions(output)
        self._apply_block_updates(output)
        self._check_batch(output)
        return self._run_rows(output)

    def _check_repeat(self, output):
        last, self.last = self.last, output
        if output.is_repeat:
            assert not output.removed
            assert not output.new_requests
            assert output.num_draft_tokens is None
            assert output.slots is last.slots
            assert output.num_scheduled_tokens is last.num_scheduled_tokens
            assert (output.num_scheduled_tokens == 1).all()
            assert (output.num_computed_tokens == last.num_computed_tokens + 1).all()
            ends = output.num_computed_tokens + 1
            assert all(
                self.rows[s].new.prefill_len <= e for s, e in zip(output.slots.tolist(), ends, strict=True)
            )

    def _apply_removals(self, output):
        for removed in output.removed:
            assert removed.slot in self.rows, f"slot {removed.slot} is removed but not held"
            del self.rows[removed.slot]
            self.removed_reasons.append(removed.reason)
            for table in self.tables:
                table[removed.slot] = -7  # a freed row's entries are poison

    def _apply_admissions(self, output):
        for new in output.new_requests:
            assert 0 <= new.slot < self.max_num_reqs
            assert new.slot not in self.rows, f"slot {new.slot} has an owner"
            assert new.num_computed_tokens < new.prefill_len
            for table in self.tables:
                table[new.slot] = 0
            history = [int(t) for t in new.prefill_token_ids]
            self.rows[new.slot] = Row(new, history, new.num_computed_tokens)

    def _apply_block_updates(self, output):
        hits = {new.slot: new.num_computed_tokens for new in output.new_requests}
        assert len(output.block_updates) == len(self.groups)
        for group, table, cache, update in zip(
            self.groups, self.tables, self.caches, output.block_updates, strict=True
        ):
            at = 0
            for slot, start, length in zip(update.slots, update.starts, update.lengths, strict=True):
                assert int(slot) in self.rows, f"slot {slot} gets blocks but is not held"
                block_ids = update.block_ids[at : at + length]
                at += length
                table[slot, start : start + length] = block_ids
                for column, block in enumerate(block_ids.tolist(), start=int(start)):
                    if block and column * group.block_size >= hits.get(int(slot), 0):
                        cache[block] = -1  # newly handed out: what it held must not be read
            assert at == len(update.block_ids)

    def _check_batch(self, output):
        slots = output.slots.tolist()
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(self.rows), "a row of the batch has no owner"
        assert output.slots.dtype == output.num_scheduled_tokens.dtype == np.int32
        assert (output.num_scheduled_tokens >= 1).all()
        assert output.total_num_tokens <= self.budget
        admitted = {new.slot for new in output.new_requests}
        assert admitted <= set(slots), "an admission without tokens"
        for group, table in zip(self.groups, self.tables, strict=True):
            users = np.bincount(
                np.concatenate([table[s][table[s] > 0] for s in self.rows] or [[0]]).astype(int)
            )
            written: list[int] = []
            for slot, count in zip(slots, output.num_scheduled_tokens.tolist(), strict=True):
                first = self.rows[slot].num_computed
                columns = range(first // group.block_size, (first + count - 1) // group.block_size + 1)
                written += [int(table[slot, column]) for column in columns]
            assert all(block > 0 for block in written), "a scheduled token has no block"
            assert len(set(written)) == len(written), "two rows write one block"
            assert all(users[block] == 1 for block in written), "a written block is shared"

    def _run_rows(self, output):
        num_reqs, width = output.num_reqs, self.num_draft_tokens + 1
        sampled = np.full((num_reqs, width), 1_000_000, np.int32)  # undefined beyond num_sampled
        num_sampled, num_rejected = np.zeros(num_reqs, np.int32), np.zeros(num_reqs, np.int32)
        failed = np.zeros(num_reqs, np.bool_)
        drafts = output.num_draft_tokens
        # Rows of one step run at once on a device: none may rely on what another one writes in the same step.
        for idx in self._rng.sample(range(num_reqs), num_reqs):
            slot = int(output.slots[idx])
            row, count = self.rows[slot], int(output.num_scheduled_tokens[idx])
            upper = int(output.num_computed_tokens[idx])
            assert upper == row.num_computed or (self.num_draft_tokens and upper > row.num_computed)
            num_drafts = int(drafts[idx]) if drafts is not None else 0
            assert num_drafts < count
            tokens = self._run_row(slot, row, count, num_drafts)
            if tokens and row.new.req_id in self.fail_ids:
                failed[idx] = True
            num_sampled[idx] = len(tokens)
            num_rejected[idx] = 1 + num_drafts - len(tokens) if tokens else 0
            sampled[idx, : len(tokens)] = tokens
        logprobs = Logprobs(
            token_ids=np.repeat(sampled[..., None], 3, axis=2),
            values=np.zeros((num_reqs, width, 3), np.float32),
            ranks=np.ones((num_reqs, width), np.int32),
        )
        return ModelRunnerOutput(sampled, num_sampled, num_rejected, failed, logprobs)

    def _run_row(self, slot, row, count, num_drafts):
        """Compute the row's tokens; returns what it samples."""
        start = row.num_computed
        known = row.history[start : start + count - num_drafts]
        assert len(known) == count - num_drafts, "a token that nobody knows was scheduled"
        if num_drafts:
            assert start + len(known) == len(row.history), "drafts before the history ends"
        limit = min(row.new.prompt_len + row.new.sampling_params.max_tokens, self.max_model_len)
        assert len(row.history) + 1 + num_drafts <= limit, "a sample beyond the longest total"
        self._sign_history(row)
        for position in range(start, start + len(known)):
            self._compute(slot, row, position, row.signatures[position])
        signature = row.signatures[start + len(known) - 1]
        if start + count < row.new.prefill_len:
            row.num_computed += count
            return []
        tokens, matching = [], True
        for idx in range(num_drafts + 1):
            if matching:
                tokens.append(next_token(signature))
                signature = extend(signature, tokens[-1])
            if idx < num_drafts:
                matching = matching and self._rng.random() < 0.6
                written = signature if matching else self._rng.randrange(MASK)
                self._write(slot, start + len(known) + idx, written)
                self.num_computed_tokens += 1
        row.num_computed += len(known) + len(tokens) - 1
        row.history += tokens
        return tokens

    def _sign_history(self, row):
        salt = row.new.sampling_params.cache_salt
        while len(row.signatures) < len(row.history):
            before = row.signatures[-1] if row.signatures else root(salt)
            row.signatures.append(extend(before, row.history[len(row.signatures)]))

    def _compute(self, slot, row, position, signature):
        for group, table, cache in zip(self.groups, self.tables, self.caches, strict=True):
            first = 0 if group.sliding_window is None else max(0, position - group.sliding_window + 1)
            seen = np.arange(first, position)
            blocks = table[slot, seen // group.block_size]
            assert (blocks > 0).all(), f"{row.new.req_id}: a visible position has no block"
            wrong = cache[blocks, seen % group.block_size] != np.array(
                row.signatures[first:position], np.int64
            )
            assert not wrong.any(), f"{row.new.req_id}: positions {seen[wrong][:4]} hold something else"
        self._write(slot, position, signature)
        self.num_computed_tokens += 1

    def _write(self, slot, position, signature):
        for group, table, cache in zip(self.groups, self.tables, self.caches, strict=True):
            block = table[slot, position // group.block_size]
            assert block > 0
            cache[block, position % group.block_size] = signature
