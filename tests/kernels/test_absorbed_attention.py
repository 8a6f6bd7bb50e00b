"""`absorbed_attention`: Gluon equals the torch twin, and the twin attention over keys and values of what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from model_states.kernels import absorbed_attention as absorbed
from model_states.kernels.absorbed_attention import (
    absorbed_attention_torch,
    absorbed_attention_triton,
    num_parts,
    slices,
)
from model_states.kernels.cross_attention import CrossRows
from model_states.kernels.join_parts import MAX_PARTS
from model_states.kernels.triton_import import triton

NUM_ENTRIES = 9


def _case(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    head_size: int,
    size: int,
    max_len: int,
    bias: bool = True,
) -> dict[str, Any]:
    """Arguments but `out`; NaN behind the entries' lengths, strided queries, and tokens that look at nothing."""
    torch.manual_seed(heads)
    lengths = torch.tensor([max_len, 1, 0, max_len // 2 + 1, max_len - 1, max(max_len - 32, 1), 0])
    entries = torch.randperm(NUM_ENTRIES)[: len(lengths)]
    slots = torch.tensor([*torch.randperm(len(lengths)).tolist(), 6, 0, 3, 6])
    kept = torch.randn(NUM_ENTRIES, max_len, size)
    for entry, length in zip(entries.tolist(), lengths.tolist(), strict=True):
        kept[entry, length:] = torch.nan
    query = torch.randn(len(slots), heads * head_size + 8)[:, : heads * head_size]
    weights = torch.randn(2, heads, head_size, size) * size**-0.5
    of_model = {"device": device, "dtype": dtype}
    places = {"device": device, "dtype": torch.int32}
    return {
        "query": query.to(**of_model).unflatten(1, (heads, head_size)),
        "kept": kept.to(**of_model),
        "key_weight": weights[0].to(**of_model),
        "value_weight": weights[1].to(**of_model),
        "value_bias": torch.randn(heads, head_size).to(**of_model) if bias else None,
        "slots": slots.to(**places),
        "entries": entries.to(**places),
        "lengths": lengths.to(**places),
        "scale": head_size**-0.5,
    }


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Gluon has no interpreter")
@pytest.mark.parametrize("max_len", [1500, 33, 7])
@pytest.mark.parametrize(
    "shape",
    [(20, 64, 1280), (16, 64, 1024), (12, 64, 768), (8, 64, 512), (6, 64, 384), (3, 80, 256), (24, 16, 640)],
    ids=str,
)
def test_kernel_equals_twin(
    shape: tuple[int, int, int], max_len: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbed, "_num_processors", lambda device: 132)
    for dtype in (torch.bfloat16, torch.float16):
        case = _case(device, dtype, *shape, max_len)
        expected = torch.empty(case["query"].shape, device=device)
        absorbed_attention_torch(expected, **case)
        out = torch.full_like(expected, torch.nan, dtype=dtype)
        # Several launches; parts of one tile and of several, and some that nothing is left for.
        for tokens, parts in ((256, 1), (256, 3), (4, 32)):
            monkeypatch.setattr(absorbed, "TOKENS", tokens)
            monkeypatch.setattr(absorbed, "num_parts", lambda *_, parts=parts: parts)
            absorbed_attention_triton(out, **case)
            torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bias", [True, False])
def test_twin_is_attention_over_keys_and_values(bias: bool) -> None:
    case = _case(torch.device("cpu"), torch.float32, 3, 8, 40, 21, bias)
    out = torch.full(case["query"].shape, torch.nan)
    absorbed_attention_torch(out, **case)
    for token, slot in enumerate(case["slots"].tolist()):
        entry, length = int(case["entries"][slot]), int(case["lengths"][slot])
        x = case["kept"][entry, :length]
        # A bias of keys is the same for all positions.
        keys = torch.einsum("pk,hdk->hpd", x, case["key_weight"]) + 3.0
        values = torch.einsum("pk,hdk->hpd", x, case["value_weight"])
        query = case["query"][token][:, None]
        expected = scaled_dot_product_attention(query, keys, values, scale=case["scale"])[:, 0]
        expected = expected if length else torch.zeros_like(expected)
        expected = expected + case["value_bias"] if bias else expected
        torch.testing.assert_close(out[token], expected, rtol=1e-4, atol=1e-5)


def test_slots_of_tokens() -> None:
    starts = torch.tensor([0, 3, 3, 4, 9, 9, 9], dtype=torch.int32)
    slots = torch.tensor([2, 0, 4, 1, 7, 7], dtype=torch.int32)
    table = torch.zeros(8, dtype=torch.int32)
    mixed = CrossRows(slots, starts, table, table, 5)
    assert mixed.token_slots(12).tolist() == [2, 2, 2, 4, 1, 1, 1, 1, 1, 7, 7, 7]
    steps = CrossRows(slots, torch.arange(7, dtype=torch.int32), table, table, 1)
    assert steps.token_slots(6) is slots


def test_slices_are_what_products_take() -> None:
    sizes = {size: slices(size) for size in range(16, 1441, 16)}
    assert {size for size, found in sizes.items() if found} >= {256, 384, 512, 640, 768, 1024, 1280}
    for size, found in sizes.items():
        if found:
            assert sum(found) * 8 == size
            assert all(part >= 16 and part & (part - 1) == 0 for part in found)


def test_few_tokens_are_cut_into_parts_and_many_are_not() -> None:
    assert num_parts(1, 1500, 132) == MAX_PARTS
    assert num_parts(64, 1500, 132) == 2
    assert num_parts(128, 1500, 132) == 1
    assert num_parts(3, 20, 132) == 1, "there is one tile"
