"""`SlotTable`: what the scheduler knows of running requests, in arrays by slot, so that a step is numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core_runner.request import Request
from core_runner.scheduling.output import IntArray


class SlotTable:
    """R slots. A slot is handed out at admission and kept until the request finishes or is preempted.

    Counts are optimistic: they include what is scheduled and not known yet. `num_tokens` counts known tokens
    and samples in flight, `num_known` those known on the host; `generation` changes when a slot is given up,
    so a step that comes back late can tell whether its row still means the same admission. `num_changes` counts
    admissions and releases: while it stays, so does every field that is not a count.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.num_computed_np: IntArray = np.zeros(max_num_reqs, np.int32)
        self.num_tokens_np: IntArray = np.zeros(max_num_reqs, np.int32)
        self.num_known_np: IntArray = np.zeros(max_num_reqs, np.int32)
        self.prefill_len_np: IntArray = np.zeros(max_num_reqs, np.int32)
        self.max_total_np: IntArray = np.zeros(max_num_reqs, np.int32)
        self.num_in_flight_np: IntArray = np.zeros(max_num_reqs, np.int32)
        self.generation_np = np.zeros(max_num_reqs, np.int64)
        self.rank_np = np.zeros((2, max_num_reqs), np.int64)  # priority, arrival
        self.is_running_np = np.zeros(max_num_reqs, np.bool_)
        # Rows that update() must look at one by one: own stop ids, or a constraint.
        self.needs_check_np = np.zeros(max_num_reqs, np.bool_)
        # Rows that one of the model's end ids ends.
        self.ends_at_eos_np = np.zeros(max_num_reqs, np.bool_)
        # Rows whose every token is reported.
        self.reports_np = np.zeros(max_num_reqs, np.bool_)
        # Rows that must not run ahead of a token that is not known.
        self.is_constrained_np = np.zeros(max_num_reqs, np.bool_)
        self.requests_np = np.full(max_num_reqs, None, dtype=object)
        self._free = list(range(max_num_reqs - 1, -1, -1))
        self._running = np.zeros(max_num_reqs, np.int32)  # in order of admission
        self._num_listed = 0
        self.num_changes = 0

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Slots that are held."""
        return len(self.requests_np) - len(self._free)

    def running(self) -> IntArray:
        """Held slots in order of admission, [num_running]; valid until the next admission or release."""
        listed = self._running[: self._num_listed]
        if self._num_listed != self.num_running:
            listed = listed[self.is_running_np[listed]]
            self._num_listed = len(listed)
            self._running[: self._num_listed] = listed
        return self._running[: self._num_listed]

    def admit(self, request: Request, num_computed: int) -> int:
        """Hand out a slot; every field of it is written."""
        if self._num_listed + len(self._free) != len(self.requests_np):
            self.running()  # a slot given up since must leave the list before it is listed again
        slot = self._free.pop()
        known, params = request.num_tokens, request.sampling_params
        is_constrained = request.constraint is not None
        self.num_computed_np[slot] = num_computed
        self.num_tokens_np[slot] = self.num_known_np[slot] = self.prefill_len_np[slot] = known
        self.max_total_np[slot] = request.max_total_len
        self.num_in_flight_np[slot] = 0
        self.rank_np[:, slot] = request.rank
        self.is_constrained_np[slot] = is_constrained
        self.needs_check_np[slot] = is_constrained or bool(params.stop_token_ids)
        self.ends_at_eos_np[slot] = not params.ignore_eos
        self.reports_np[slot] = request.reports_tokens
        self.is_running_np[slot] = True
        self.requests_np[slot] = request
        self._running[self._num_listed] = slot
        self._num_listed += 1
        self.num_changes += 1
        request.slot = slot
        return slot

    def release(self, request: Request) -> int:
        """Take a request's slot back; samples in flight are counted on the request from now on."""
        slot = request.slot
        assert self.requests_np[slot] is request, f"request {request.req_id!r} does not hold slot {slot}"
        # They still arrive, by request and no longer by slot.
        request.num_in_flight = int(self.num_in_flight_np[slot])
        request.slot = -1
        # Rows of steps in flight that name this slot are told by it from the next owner's.
        self.generation_np[slot] += 1
        self.is_running_np[slot] = self.is_constrained_np[slot] = False
        self.requests_np[slot] = None
        self._free.append(slot)
        self.num_changes += 1
        return slot

    def has_sampled(self, request: Request) -> bool:
        """Whether a token is known that this running request got since it was admitted."""
        return bool(self.num_known_np[request.slot] > self.prefill_len_np[request.slot])

    def by_rank(self, slots: IntArray) -> npt.NDArray[np.intp]:
        """Order of `slots` from the one that runs first to the one that gives way first, [n]."""
        return np.lexsort((self.rank_np[1, slots], self.rank_np[0, slots]))

    def check_integrity(self) -> None:
        """Recount free and running slots."""
        running = self.running()
        assert len(set(running.tolist())) == len(running) == int(self.is_running_np.sum()), "running list"
        assert sorted([*self._free, *running.tolist()]) == list(range(len(self.requests_np))), "slots lost"
        for slot in running.tolist():
            assert self.requests_np[slot].slot == slot, f"slot {slot} and its request disagree"
