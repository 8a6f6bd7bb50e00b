"""`CrossAttention` names contents, sizes its pool, and refuses options that mean nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model_states import CapabilityError
from model_states.components import cross_attention as component
from model_states.components.content_key import content_key


def test_content_keys_differ_where_content_does():
    array = np.arange(6, dtype=np.float32)
    same = [array, array.copy(), torch.from_numpy(array), np.stack([array, array], 1)[:, 0]]
    others = [array + 1, array.reshape(2, 3), array.astype(np.float64), array[:5]]
    assert len({content_key(value) for value in same}) == 1
    assert len({content_key(value) for value in (array, *others)}) == 5
    assert content_key(array, "clip") == content_key(others[0], "clip") != content_key(array, "clap")
    for bad in ("", 3, b"clip"):
        with pytest.raises(ValueError, match="must be a string that no other content has"):
            content_key(array, bad)


def test_long_content_is_named_by_all_of_it():
    array = np.zeros(400_000, np.float32)
    changed = [array.copy() for _ in range(8)]
    for place, other in enumerate(changed):
        other[place * 57_142] = 1.0
    assert content_key(array) == content_key(array.copy())
    assert len({content_key(value) for value in (array, array[:-1], *changed)}) == 10


def test_what_lies_on_a_device_has_a_name_of_its_own():
    tensor = torch.empty(3, device="meta")
    assert content_key(tensor) != content_key(tensor)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_bad_options(value):
    config = SimpleNamespace(options={"encoder_entries": value})
    with pytest.raises(CapabilityError, match=r"encoder_entries=.* must be an integer of at least 1"):
        component._option(config, "encoder_entries")


def test_the_pool_has_an_entry_for_each_slot_and_some_to_keep_where_memory_allows(monkeypatch):
    config = SimpleNamespace(max_num_reqs=10, device=torch.device("cpu"))
    assert component._choose_num_entries(config, 1 << 20) == 13
    assert component._choose_num_entries(config, 1 << 30) == 3, "4 GiB, less the null entry"
    with pytest.raises(CapabilityError, match="an encoder output takes 4096 MiB"):
        component._choose_num_entries(config, 4 << 30)
