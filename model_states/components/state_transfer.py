"""`StateTransfer`: requests bring the state after their first tokens, or leave theirs, whichever components keep it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from model_states.batch import InputBatch, RemoveReason, RequestInputs, RequestView
from model_states.components.saved_state import SavedRows, SavedState, StateKeeper, StatePart
from model_states.hookspecs import hookimpl
from model_states.interface import Component


class StateTransfer(Component):
    """Reads the model inputs "saved_state" and "keep_state" for a model state of the capability "restore".

    Blocks of such requests are shared with nobody, since tokens alone do not say what is in them.
    """

    input_names = frozenset({"saved_state", "keep_state"})

    def __init__(self, parts: Sequence[StatePart]) -> None:
        """parts: all components that keep something of a request between steps."""
        self._parts = parts
        self._arrived: dict[int, SavedState] = {}  # by slot, until the next step
        self._keepers: dict[int, tuple[str, StateKeeper]] = {}  # with the request's name
        self._num_tokens: dict[int, int] = {}  # of the slots with a keeper
        self._slot_tables: tuple[torch.Tensor, ...] = ()

    @hookimpl
    def input_keys(self, request: RequestInputs) -> Mapping[str, bytes]:
        """Refuse states that do not fit."""
        state, keeper = (request.model_inputs.get(name) for name in ("saved_state", "keep_state"))
        if keeper is not None and not isinstance(keeper, StateKeeper):
            raise ValueError(f"keep_state={keeper!r} must be a StateKeeper")
        if state is not None:
            self._check(state, request)
        return {}

    def _check(self, state: object, request: RequestInputs) -> None:
        if not isinstance(state, SavedState):
            raise ValueError(f"saved_state={state!r} must be a SavedState")
        num_tokens = state.num_restored_tokens
        if not 0 < num_tokens < request.prompt_len:
            raise ValueError(
                f"its state covers {num_tokens} tokens of a prompt of {request.prompt_len}; give one token more"
            )
        if not np.array_equal(state.token_ids, request.prompt_token_ids[:num_tokens]):
            raise ValueError(
                f"its state is of other tokens than the first {num_tokens} of the prompt; take `SavedState.prompt`"
            )
        for name, tensor in state.tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                raise ValueError(
                    f"its state {name} must be a dense tensor with data, as `StateKeeper.take` gives it"
                )
        want = {
            name: (len(rows.entries), pool)
            for rows in self._rows(num_tokens)
            for name, pool in rows.pools.items()
        }
        for name in sorted(state.tensors.keys() | want.keys()):
            if name not in want:
                raise ValueError(
                    f"its state is another model's: this one keeps no {name}; give the tokens alone"
                )
            _check_tensor(name, state.tensors.get(name), *want[name])

    @hookimpl
    def add_request(self, slot: int, request: RequestView) -> None:
        """Note a state that is to be loaded, unless a longer prefix was hit, and who wants the last one."""
        state, keeper = (request.model_inputs.get(name) for name in ("saved_state", "keep_state"))
        self._arrived.pop(slot, None)
        if state is not None and request.num_computed_tokens == state.num_restored_tokens:
            self._arrived[slot] = state
        if keeper is not None:
            self._keepers[slot] = request.req_id, keeper
            self._num_tokens[slot] = request.num_computed_tokens

    @hookimpl
    def run_encoder(self, batch: InputBatch) -> None:
        """Load the states that requests brought, into blocks of their own."""
        self._slot_tables = batch.slot_tables
        if not self._arrived and not self._keepers:
            return
        # A scheduler may admit a request some steps before it has blocks and runs.
        for slot in batch.idx_mapping_np.tolist() if self._arrived else ():
            if slot in self._arrived:
                self._load(slot, self._arrived.pop(slot))
        ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens_np
        for row_idx, slot in enumerate(batch.idx_mapping_np.tolist() if self._keepers else ()):
            if slot in self._keepers:
                self._num_tokens[slot] = int(ends[row_idx])

    @hookimpl
    def remove_request(self, slot: int, reason: RemoveReason) -> None:
        """Hand the state to who wants it; a preempted request's may be its last, if its last token is under way."""
        never_loaded = self._arrived.pop(slot, None) is not None
        (req_id, keeper), num_tokens = self._keepers.pop(slot, ("", None)), self._num_tokens.pop(slot, 0)
        if keeper is not None and num_tokens and reason != "interrupted" and not never_loaded:
            keeper.keep(req_id, num_tokens, self._copies(slot, num_tokens))

    def export_state(self, slot: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Copies, on the device, of a slot's state after the `num_tokens` tokens that it has computed."""
        return dict(self._copies(slot, num_tokens))

    def _copies(self, slot: int, num_tokens: int) -> Iterator[tuple[str, torch.Tensor]]:
        for rows in self._rows(num_tokens):
            indices = rows.indices(self._slot_tables[rows.group_index], slot)
            for name, pool in rows.pools.items():
                yield name, pool.index_select(0, indices)

    def _load(self, slot: int, state: SavedState) -> None:
        for rows in self._rows(state.num_restored_tokens):
            indices = rows.indices(self._slot_tables[rows.group_index], slot)
            for name, pool in rows.pools.items():
                pool.index_copy_(0, indices, _to_device(state.tensors[name], pool.device))

    def _rows(self, num_tokens: int) -> list[SavedRows]:
        return [rows for part in self._parts for rows in part.saved_rows(num_tokens)]


def _check_tensor(name: str, tensor: torch.Tensor | None, num_entries: int, pool: torch.Tensor) -> None:
    """Raises `ValueError` unless it can be copied to so many rows of the pool."""
    if tensor is None:
        raise ValueError(
            f"its state is another model's, or not whole: {name} is missing; give the tokens alone"
        )
    got, want = tuple(tensor.shape), (num_entries, *pool.shape[1:])
    if got != want:
        raise ValueError(
            f"its state is another model's, or of other tokens: {name} is {got}, not {want}; give the tokens alone"
        )
    if tensor.dtype != pool.dtype:
        raise ValueError(
            f"its state {name} is of {tensor.dtype}, and this engine keeps {pool.dtype}; load the model with the dtype "
            "(and state_dtype) that it was kept with, or convert its tensors"
        )


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """In the order of the current stream, which a copy from memory that is not pinned would have the host wait for."""
    if tensor.device == device or tensor.is_cuda:
        return tensor.to(device, non_blocking=True)
    return tensor.pin_memory().to(device, non_blocking=True)
