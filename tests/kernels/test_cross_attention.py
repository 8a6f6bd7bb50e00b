"""`cross_attention`: Triton equals the torch twin, and the twin attention over the entry's positions alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from model_states.kernels import cross_attention_step as step
from model_states.kernels.cross_attention import CrossRows, cross_attention_torch, cross_attention_triton
from model_states.kernels.write_entries import Entries

POISON = 7777.0
MAX_LEN, NUM_ENTRIES, NULL_SLOT = 70, 4, 5
SLOTS = [3, 0, 2]
ENTRIES = [2, 9, 1, 3, 9, 0]
LENGTHS = [70, 9, 1, 67, 9, 0]


def _case(
    device: torch.device,
    query_lens: list[int],
    padding: int,
    heads: int,
    kv_heads: int,
    size: int,
    is_int8: bool = False,
):
    """(query, key_pool, value_pool, rows); NaN behind the entries' lengths, garbage in padding tokens."""
    torch.manual_seed(1)
    num_tokens = sum(query_lens) + padding
    query = torch.randn(num_tokens, heads * size + 3, device=device)[:, : heads * size]
    query = query.view(num_tokens, heads, size) if padding == 0 else query.reshape(num_tokens, heads, size)
    query[sum(query_lens) :] = POISON
    pools = torch.randn(2, NUM_ENTRIES, kv_heads, MAX_LEN, size, device=device)
    for slot, entry in enumerate(ENTRIES):
        if entry < NUM_ENTRIES:
            pools[:, entry, :, LENGTHS[slot] :] = torch.nan
    if is_int8:
        scales = pools.abs().nan_to_num().amax(-2) / 127.0
        pools = [
            Entries(*pair)
            for pair in zip(
                (pools / scales[..., None, :]).nan_to_num(99.0).round().to(torch.int8), scales, strict=True
            )
        ]
    else:
        pools = [Entries(values) for values in pools]
    num_padding_rows = padding if max(query_lens) == 1 else 2
    starts = torch.tensor([0, *query_lens, *[0] * num_padding_rows]).cumsum(0)
    rows = CrossRows(
        torch.tensor(SLOTS + [NULL_SLOT] * num_padding_rows, dtype=torch.int32, device=device),
        starts.to(device, torch.int32),
        torch.tensor(ENTRIES, dtype=torch.int32, device=device),
        torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        max(query_lens),
    )
    return query, *pools, rows


@pytest.mark.parametrize("heads", [(2, 2, 16), (4, 2, 24)], ids=["each its own", "grouped"])
@pytest.mark.parametrize(
    ("query_lens", "padding"),
    [([1, 1, 1], 2), ([17, 1, 20], 3), ([1, 2, 1], 0)],
    ids=["decode", "mixed", "few"],
)
@pytest.mark.parametrize(("parts", "is_int8"), [(1, False), (3, False), (1, True), (3, True)])
def test_kernel_equals_twin(query_lens, padding, heads, parts, is_int8, device, monkeypatch):
    monkeypatch.setattr(step, "num_parts", lambda num_rows, num_heads: parts)
    query, keys, values, rows = _case(device, query_lens, padding, *heads, is_int8=is_int8)
    query = query.half() if is_int8 else query
    out, expected = (torch.full_like(query, POISON) for _ in range(2))
    cross_attention_torch(expected, query, keys, values, rows, 0.3)
    close = {"rtol": 1e-3, "atol": 1e-3} if is_int8 else {"rtol": 1e-5, "atol": 1e-5}
    num_values, num_counters = step.scratch_sizes(len(rows.idx_mapping), *heads[::2])
    scratch = torch.full((num_values,), POISON, device=device)
    arrived = torch.zeros(num_counters, dtype=torch.int32, device=device)
    for _ in range(2):  # the counters are as they were
        cross_attention_triton(out.fill_(POISON), query, keys, values, rows, 0.3, scratch, arrived)
        torch.testing.assert_close(out, expected, **close)
    assert not arrived.any()


def test_twin_is_attention_over_the_entry(device):
    query_lens = [2, 1, 4]
    query, keys, values, rows = _case(device, query_lens, 2, 4, 2, 8)
    out = torch.full(query.shape, POISON, device=device)
    cross_attention_torch(out, query, keys, values, rows, 0.5)
    first = 0
    for slot, query_len in zip(SLOTS, query_lens, strict=True):
        q = query[first : first + query_len].transpose(0, 1)
        k, v = (
            pool.values[ENTRIES[slot], :, : LENGTHS[slot]].repeat_interleave(2, 0) for pool in (keys, values)
        )
        expected = scaled_dot_product_attention(q, k, v, scale=0.5).transpose(0, 1)
        torch.testing.assert_close(out[first : first + query_len], expected, rtol=1e-5, atol=1e-5)
        first += query_len
    assert not out[first:].any()


def test_few_rows_are_cut_into_more_parts():
    assert step.num_parts(1, 20) == step.MAX_PARTS
    assert step.num_parts(256, 20) == 1
    assert step.scratch_sizes(256, 20, 64) == (0, 0)
    assert step.scratch_sizes(1, 20, 64) == (step.MAX_PARTS * 20 * 66, 20)
