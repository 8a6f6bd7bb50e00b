"""`RequestStates`: what the core keeps of every request between steps, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from core_runner.errors import SchedulerOutputError
from core_runner.sampling.option_rows import TokenHistory
from core_runner.scheduling.output import IntArray, NewRequest, RemovedRequest
from model_states.staged import StagedTensor
from model_states.staged_writer import StagedWriter

POISON = -1
_FIELDS = ("prompt_len", "prefill_len", "num_computed_tokens", "total_len", "last_sampled_tokens")


class RequestStates:
    """Arrays by slot, R + 1 rows; row R is the null slot that padding rows name, and stays zero.

    On the device, all int32: prompt_len, prefill_len, num_computed_tokens (the truth), total_len (tokens
    known, sampled ones included), last_sampled_tokens [R + 1]; draft_tokens [R + 1, max(K, 1)]; all_token_ids
    [R + 1, L]. On the host: req_ids, generations (admissions a slot has seen), prefill_len_np (0: free) [R].

    Changes that the host makes wait for `apply_staged_writes`, so they fall in line with the steps on the
    stream. poison=True is a debug mode: whatever a free slot holds is `POISON`, so that a token read from it
    is refused by the embedding, and a position made from it maps to nothing. uva=False keeps all_token_ids in
    device memory, and a writer writes for several tensors (see `StagedTensor`).
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        num_draft_tokens: int,
        device: torch.device | str,
        *,
        poison: bool = False,
        uva: bool = True,
        writer: StagedWriter | None = None,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.num_draft_tokens = num_draft_tokens
        self.device = torch.device(device)
        self.poison = poison
        num_rows, int32 = max_num_reqs + 1, torch.int32
        # One table with a row per field: an admission is then one copy and one kernel for all of them.
        staged = partial(StagedTensor, dtype=int32, device=device, writer=writer)
        self._fields = staged((len(_FIELDS), num_rows))
        self._draft_tokens = staged((num_rows, max(num_draft_tokens, 1)))
        self._all_token_ids = staged((num_rows, max_model_len), uva=uva)
        fields = self._fields.tensor
        (
            self.prompt_len,
            self.prefill_len,
            self.num_computed_tokens,
            self.total_len,
            self.last_sampled_tokens,
        ) = fields
        self.draft_tokens = self._draft_tokens.tensor
        self.all_token_ids = self._all_token_ids.tensor
        self.req_ids: list[str | None] = [None] * max_num_reqs
        self.generations: npt.NDArray[np.int64] = np.zeros(max_num_reqs, dtype=np.int64)
        self.prefill_len_np: IntArray = np.zeros(max_num_reqs, dtype=np.int32)
        if poison:
            fields[:, :max_num_reqs] = POISON
            self.draft_tokens[:max_num_reqs] = POISON
            self.all_token_ids[:max_num_reqs] = POISON

    @property
    def null_slot(self) -> int:
        """The slot of padding rows, R."""
        return self.max_num_reqs

    @property
    def history(self) -> TokenHistory:
        """Tokens of every slot as the device knows them, for the sampler."""
        return TokenHistory(self.all_token_ids, self.total_len, self.prompt_len)

    @property
    def num_free_slots(self) -> int:
        """Slots that hold no request."""
        return self.req_ids.count(None)

    def add(self, new: NewRequest) -> None:
        """Admit `new` to its slot; writes every field. Raises `SchedulerOutputError` and changes nothing."""
        self._check_new(new, self.prefill_len_np)
        self.fill([new])

    def fill(self, new_requests: Sequence[NewRequest]) -> None:
        """`add` for admissions that `check_changes` has let pass; many cost little more than one."""
        if not new_requests:
            return
        slots = np.array([new.slot for new in new_requests])
        tokens = [np.asarray(new.prefill_token_ids, dtype=np.int32) for new in new_requests]
        lengths, flat = np.array([*map(len, tokens)]), np.concatenate(tokens)
        for new in new_requests:
            self.req_ids[new.slot] = new.req_id
        self.generations[slots] += 1
        self.prefill_len_np[slots] = lengths
        prompt_lens = [new.prompt_len for new in new_requests]
        computed = [new.num_computed_tokens for new in new_requests]
        # last_sampled_tokens is read first after a step has sampled; until then any valid id will do.
        self._stage_fields(slots, [prompt_lens, lengths, computed, lengths, flat[np.cumsum(lengths) - 1]])
        starts = np.zeros_like(slots)
        if self.num_draft_tokens > 0:
            drafts = np.full_like(slots, self.num_draft_tokens)
            self._draft_tokens.stage_runs(slots, starts, drafts, np.zeros(int(drafts.sum()), np.int32))
        self._all_token_ids.stage_runs(slots, starts, lengths, flat)

    def remove(self, slot: int) -> None:
        """Give `slot` up. Raises `SchedulerOutputError` if no request holds it."""
        self._check_removed(slot, self.prefill_len_np)
        self.clear([slot])

    def clear(self, slots: Sequence[int]) -> None:
        """`remove` for slots that `check_changes` has let pass."""
        self.prefill_len_np[slots] = 0
        for slot in slots:
            self.req_ids[slot] = None
            if self.poison:
                self._poison(slot)

    def _poison(self, slot: int) -> None:
        self._stage_fields(np.array([slot]), [[POISON]] * len(_FIELDS))
        self._draft_tokens.stage(slot, 0, np.full(self.draft_tokens.shape[1], POISON))
        self._all_token_ids.stage(slot, 0, np.full(self.max_model_len, POISON))

    def apply_staged_writes(self) -> None:
        """Bring admissions and removals to the device; launches nothing when there were none."""
        for staged in (self._fields, self._draft_tokens, self._all_token_ids):
            staged.apply()

    def check_changes(
        self, removed: Sequence[RemovedRequest], new_requests: Sequence[NewRequest]
    ) -> IntArray:
        """`prefill_len_np` as it will be after these removals and admissions; 0 means a free slot.

        Changes nothing. Raises `SchedulerOutputError` for the first one that cannot be made.
        """
        if not removed and not new_requests:
            return self.prefill_len_np
        prefill_len = self.prefill_len_np.copy()
        for request in removed:
            self._check_removed(request.slot, prefill_len)
            prefill_len[request.slot] = 0
        for new in new_requests:
            self._check_new(new, prefill_len)
            prefill_len[new.slot] = new.prefill_len
        return prefill_len

    def _stage_fields(self, slots: npt.NDArray[np.int64], fields: Sequence[npt.ArrayLike]) -> None:
        """One value for each field and slot."""
        rows = np.repeat(np.arange(len(fields)), len(slots))
        self._fields.stage_runs(rows, np.tile(slots, len(fields)), np.ones_like(rows), np.concatenate(fields))

    def _check_slot(self, who: str, slot: int) -> None:
        if not 0 <= slot < self.max_num_reqs:
            raise SchedulerOutputError(
                f"{who} names slot {slot}, outside [0, max_num_reqs={self.max_num_reqs})"
            )

    def _check_removed(self, slot: int, prefill_len: IntArray) -> None:
        self._check_slot("a removal", slot)
        if prefill_len[slot] == 0:
            raise SchedulerOutputError(f"slot {slot} is removed but holds no request; remove a slot once")

    def _check_new(self, new: NewRequest, prefill_len: IntArray) -> None:
        who = f"request {new.req_id!r}"
        self._check_slot(who, new.slot)
        if prefill_len[new.slot] != 0:
            raise SchedulerOutputError(f"{who} names slot {new.slot}, which is taken; choose a free slot")
        if not 1 <= new.prefill_len <= self.max_model_len:
            raise SchedulerOutputError(
                f"{who} has {new.prefill_len} tokens to prefill, outside "
                f"[1, max_model_len={self.max_model_len}]"
            )
        if not 0 <= new.num_computed_tokens < new.prefill_len:
            raise SchedulerOutputError(
                f"{who} has num_computed_tokens={new.num_computed_tokens}, outside [0, {new.prefill_len}): "
                f"at least one token must be computed"
            )
        if not 0 <= new.prompt_len <= new.prefill_len:
            raise SchedulerOutputError(
                f"{who} has prompt_len={new.prompt_len}, outside [0, {new.prefill_len}]"
            )
