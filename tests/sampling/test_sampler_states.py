"""`SamplerStates`: what the device and the host hold after admissions, removals and reuse of a slot."""

import pytest
import torch

from core_runner.sampling.states import SamplerStates
from core_runner.sampling_params import SamplingParams as Params


def device_row(states, slot):
    fields = (states.temperature, states.top_p, states.min_p, states.top_k, states.seed)
    return tuple(field[slot].item() for field in fields)


def test_null_slot_is_greedy_and_asks_for_nothing(device):
    states = SamplerStates(3, device)
    assert states.temperature.shape == states.seed.shape == (4,)
    assert states.temperature[3] == 0
    assert not states.filters_np[3]
    assert states.num_logprobs_np[3] == -1


def test_admission_reaches_the_device_with_the_staged_writes(device):
    states = SamplerStates(3, device)
    before = device_row(states, 1)
    states.add(1, Params(temperature=0.5, top_p=0.25, min_p=0.125, top_k=-1), -(2**63))
    assert device_row(states, 1) == before
    states.apply_staged_writes()
    assert device_row(states, 1) == (0.5, 0.25, 0.125, 0, -(2**63))
    assert device_row(states, 0) == device_row(states, 2) == before


def test_reused_slot_keeps_nothing_of_the_last_request(device):
    states = SamplerStates(2, device)
    states.add(0, Params(temperature=0.5, top_p=0.5, min_p=0.5, top_k=5, logprobs=3), 2**63 - 1)
    states.apply_staged_writes()
    states.remove(0)
    assert (states.filters_np[0], states.num_logprobs_np[0]) == (False, -1)
    states.add(0, Params(temperature=0), 1)
    states.apply_staged_writes()
    assert device_row(states, 0) == (0.0, 1.0, 0.0, 0, 1)
    assert (states.filters_np[0], states.num_logprobs_np[0]) == (False, -1)


def test_views_keep_their_address(device):
    states = SamplerStates(2, device)
    address = states.temperature.data_ptr()
    states.add(1, Params(), 5)
    states.apply_staged_writes()
    assert states.temperature.data_ptr() == address
    assert states.temperature[1] == 1


@pytest.mark.parametrize(
    ("params", "filters"),
    [
        (Params(temperature=0, top_k=5), False),
        (Params(temperature=5e-324, top_p=0.5), False),
        (Params(top_k=0), False),
        (Params(top_k=1), True),
        (Params(top_p=0.5), True),
        (Params(min_p=0.5), True),
    ],
)
def test_host_knows_who_filters(device, params, filters):
    states = SamplerStates(1, device)
    states.add(0, params, 0)
    assert states.filters_np[0] == filters


def test_temperature_stays_inside_float32(device):
    states = SamplerStates(1, device)
    states.add(0, Params(temperature=1e300), 0)
    states.apply_staged_writes()
    assert torch.isfinite(states.temperature).all()
    assert states.temperature[0] >= 1e29
