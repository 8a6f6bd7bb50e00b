"""Request slots: every field is written at admission, poison is loud, and bad admissions change nothing."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from core_runner.errors import SchedulerOutputError
from core_runner.request_states import POISON, RequestStates
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import NewRequest, RemovedRequest

R, L, K = 4, 12, 2
ARRAYS = (
    "prompt_len",
    "prefill_len",
    "num_computed_tokens",
    "total_len",
    "last_sampled_tokens",
    "draft_tokens",
    "all_token_ids",
)


def new_request(slot: int, token_ids: list[int], **fields: Any) -> NewRequest:
    fields = {"prompt_len": len(token_ids), "num_computed_tokens": 0, "req_id": f"r{slot}", **fields}
    return NewRequest(
        slot=slot, prefill_token_ids=token_ids, sampling_params=SamplingParams(), seed=0, **fields
    )


def slot_bytes(states: RequestStates, slot: int) -> list[list[int]]:
    return [getattr(states, name)[slot].reshape(-1).tolist() for name in ARRAYS]


@pytest.mark.parametrize("poison", [False, True])
def test_admission_writes_every_field_of_its_slot_only(device: torch.device, poison: bool) -> None:
    states = RequestStates(R, L, K, device, poison=poison)
    for name in ARRAYS:
        getattr(states, name)[:] = 1234  # whatever an earlier owner left
    states.add(new_request(2, [5, 6, 7, 8], prompt_len=3, num_computed_tokens=1))
    states.apply_staged_writes()
    found = dict(zip(ARRAYS, slot_bytes(states, 2), strict=True))
    history = found.pop("all_token_ids")
    assert history == [5, 6, 7, 8] + [1234] * (L - 4)  # total_len guards the rest
    assert found == {
        "prompt_len": [3],
        "prefill_len": [4],
        "num_computed_tokens": [1],
        "total_len": [4],
        "last_sampled_tokens": [8],
        "draft_tokens": [0, 0],
    }
    for slot in (0, 1, 3, R):
        assert set(chain(*slot_bytes(states, slot))) == {1234}


def test_host_side_of_a_slot_over_two_owners(device: torch.device) -> None:
    states = RequestStates(R, L, 0, device)
    assert states.num_free_slots == R
    states.add(new_request(1, [3], req_id="first"))
    assert (states.req_ids[1], states.prefill_len_np[1], states.generations[1]) == ("first", 1, 1)
    states.remove(1)
    assert (states.req_ids[1], states.prefill_len_np[1], states.generations[1]) == (None, 0, 1)
    states.add(new_request(1, [3, 4], req_id="second"))
    assert (states.req_ids[1], states.prefill_len_np[1], states.generations[1]) == ("second", 2, 2)
    assert states.num_free_slots == R - 1


def test_poison_fills_free_slots_and_spares_the_null_slot(device: torch.device) -> None:
    states = RequestStates(R, L, K, device, poison=True)
    poisoned = slot_bytes(states, 0)
    assert set(chain(*poisoned)) == {POISON}
    states.add(new_request(0, [4] * L))
    states.apply_staged_writes()
    assert POISON not in chain(*slot_bytes(states, 0))
    states.remove(0)
    states.apply_staged_writes()
    assert slot_bytes(states, 0) == poisoned
    assert set(chain(*slot_bytes(states, R))) == {0}


def test_removed_and_admitted_again_before_one_apply(device: torch.device) -> None:
    """The poison of the old owner must not land on the new one."""
    states = RequestStates(R, L, K, device, poison=True)
    states.add(new_request(3, [9] * L))
    states.apply_staged_writes()
    states.remove(3)
    states.add(new_request(3, [1, 2]))
    states.apply_staged_writes()
    assert states.all_token_ids[3].tolist() == [1, 2] + [POISON] * (L - 2)
    assert [states.prefill_len[3].item(), states.total_len[3].item()] == [2, 2]
    assert states.draft_tokens[3].tolist() == [0, 0]


BAD_ADMISSIONS = {
    "slot below the range": (new_request(-1, [1]), "slot -1, outside [0, max_num_reqs=4)"),
    "null slot": (new_request(R, [1]), "slot 4, outside [0, max_num_reqs=4)"),
    "slot is taken": (new_request(1, [1]), "slot 1, which is taken"),
    "no tokens": (new_request(0, []), "0 tokens to prefill, outside [1, max_model_len=12]"),
    "too many tokens": (new_request(0, [1] * 13), "13 tokens to prefill"),
    "all computed": (new_request(0, [1, 2], num_computed_tokens=2), "num_computed_tokens=2, outside [0, 2)"),
    "negative computed": (new_request(0, [1, 2], num_computed_tokens=-1), "num_computed_tokens=-1"),
    "prompt over prefill": (new_request(0, [1, 2], prompt_len=3), "prompt_len=3, outside [0, 2]"),
}


@pytest.mark.parametrize(("new", "message"), BAD_ADMISSIONS.values(), ids=BAD_ADMISSIONS)
def test_a_bad_admission_names_the_value_and_changes_nothing(new: NewRequest, message: str) -> None:
    states = RequestStates(R, L, 0, "cpu")
    states.add(new_request(1, [7]))
    states.apply_staged_writes()
    before = [slot_bytes(states, slot) for slot in range(R + 1)], list(states.req_ids)
    with pytest.raises(SchedulerOutputError) as error:
        states.add(new)
    assert message in str(error.value)
    assert repr(new.req_id) in str(error.value)
    with pytest.raises(SchedulerOutputError):
        states.check_changes([], [new])
    states.apply_staged_writes()
    assert ([slot_bytes(states, slot) for slot in range(R + 1)], list(states.req_ids)) == before


@pytest.mark.parametrize("slot", [-1, 0, R])
def test_removing_a_slot_that_holds_nothing(slot: int) -> None:
    states = RequestStates(R, L, 0, "cpu")
    with pytest.raises(SchedulerOutputError, match=f"slot {slot}"):
        states.remove(slot)


def test_check_changes_follows_the_order_of_a_step() -> None:
    """Removals come first, so their slots may be given out again; nothing is changed by looking."""
    states = RequestStates(R, L, 0, "cpu")
    states.add(new_request(1, [7]))
    removal = RemovedRequest(1, "finished")
    after = states.check_changes([removal], [new_request(1, [1, 2, 3]), new_request(2, [4])])
    assert after.tolist() == [0, 3, 1, 0]
    assert states.prefill_len_np.tolist() == [0, 1, 0, 0]
    with pytest.raises(SchedulerOutputError, match="remove a slot once"):
        states.check_changes([removal, removal], [])
    with pytest.raises(SchedulerOutputError, match="taken"):
        states.check_changes([], [new_request(2, [1]), new_request(2, [1])])
