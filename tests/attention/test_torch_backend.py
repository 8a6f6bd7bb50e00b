"""The torch backend against dense attention over a sequence that was never paged."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, build, dense

from model_states.attention import AttentionMetadata, TorchAttention

BASE = Case(rows=((5, 5), (1, 33), (7, 20), (1, 1), (1, 16)))


def run(case: Case, device: torch.device) -> None:
    step = build(case, device)
    backend = TorchAttention()
    before = step.key_cache.clone()
    out = backend.attend(step.query, step.key_cache, step.value_cache, step.metadata, case.spec, step.sinks)
    assert out.shape == (step.query.shape[0], case.num_heads, case.head_size_v)
    assert out.dtype == case.dtype
    torch.testing.assert_close(out[: case.num_tokens].float(), dense(case, step), atol=1e-5, rtol=1e-5)
    assert not out[case.num_tokens :].any()
    torch.testing.assert_close(before, step.key_cache, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_grouped_heads(group: int, device: torch.device) -> None:
    run(BASE.but(num_kv_heads=2, num_heads=2 * group), device)


@pytest.mark.parametrize("window", [1, 3, 17, 64, None])
@pytest.mark.parametrize("block_size", [4, 16])
def test_sliding_window(window: int | None, block_size: int, device: torch.device) -> None:
    run(BASE.but(window=window, block_size=block_size), device)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 2.0, 50.0])
def test_soft_cap_and_sinks(soft_cap: float | None, sinks: bool, device: torch.device) -> None:
    run(BASE.but(soft_cap=soft_cap, sinks=sinks, window=9), device)


@pytest.mark.parametrize(
    ("head_size", "head_size_v"), [(8, 8), (64, 64), (80, 80), (256, 256), (24, 16), (192, 128)]
)
def test_head_sizes(head_size: int, head_size_v: int, device: torch.device) -> None:
    run(BASE.but(head_size=head_size, head_size_v=head_size_v), device)


@pytest.mark.parametrize("changes", [{}, {"window": 9, "sinks": True, "soft_cap": 20.0}], ids=str)
def test_values_that_are_a_part_of_the_key(changes: dict[str, object], device: torch.device) -> None:
    shared = BASE.but(num_kv_heads=1, head_size=24, head_size_v=16, value_from_key=True)
    run(shared.but(**changes), device)
    run(shared.but(num_kv_heads=2, head_size_v=24, **changes), device)


def test_prefill_longer_than_a_tile(device: torch.device) -> None:
    run(Case(rows=((530, 530), (1, 300), (257, 400), (300, 301)), num_heads=2, num_kv_heads=1), device)
    run(Case(rows=((530, 530), (1, 300), (257, 400)), num_heads=2, num_kv_heads=1, window=100), device)


def test_many_rows_of_every_length(device: torch.device) -> None:
    run(Case(rows=tuple((1, n) for n in range(1, 70))), device)


def test_rows_without_a_query_and_padding_are_nobodys(device: torch.device) -> None:
    run(BASE.but(rows=((0, 0), (3, 9), (0, 0), (1, 4), (0, 0), (0, 0)), padding_tokens=5), device)
    run(Case(rows=((0, 0), (0, 0)), padding_tokens=3), device)


def test_a_group_is_split_when_its_scores_do_not_fit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_states.attention.torch_backend.MAX_SCORES", 300)
    run(Case(rows=tuple((1, n) for n in range(1, 20))), device)


@pytest.mark.parametrize("window", [None, 6])
def test_chunked_prefill_equals_whole(window: int | None, device: torch.device) -> None:
    whole = Case(rows=((45, 45),), window=window)
    step = build(whole, device)
    backend = TorchAttention()
    expected = backend.attend(step.query, step.key_cache, step.value_cache, step.metadata, whole.spec)
    pieces, done = [], 0
    for length in (1, 16, 13, 1, 14):
        start_loc = torch.tensor([0, length], dtype=torch.int32, device=device)
        seq_lens = torch.tensor([done + length], dtype=torch.int32, device=device)
        metadata = AttentionMetadata(
            start_loc, seq_lens, step.metadata.block_table, step.metadata.slot_mapping, length, done + length
        )
        query = step.query[done : done + length]
        pieces.append(backend.attend(query, step.key_cache, step.value_cache, metadata, whole.spec))
        done += length
    torch.testing.assert_close(torch.cat(pieces), expected[:done], atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    case = BASE.but(rows=((1, 30), (1, 18), (1, 25), (4, 29)))
    step = build(case, device)
    backend = TorchAttention()
    together = backend.attend(step.query, step.key_cache, step.value_cache, step.metadata, case.spec)
    start = 0
    for row, (query_len, seq_len) in enumerate(case.rows):
        alone = AttentionMetadata(
            torch.tensor([0, query_len], dtype=torch.int32, device=device),
            step.metadata.seq_lens[row : row + 1],
            step.metadata.block_table[row : row + 1],
            step.metadata.slot_mapping,
            query_len,
            seq_len,
        )
        query = step.query[start : start + query_len]
        out = backend.attend(query, step.key_cache, step.value_cache, alone, case.spec)
        torch.testing.assert_close(out, together[start : start + query_len], atol=1e-5, rtol=1e-5)
        start += query_len


def test_half_precision_is_computed_in_fp32(device: torch.device) -> None:
    case = BASE.but(dtype=torch.bfloat16)
    step = build(case, device)
    out = TorchAttention().attend(step.query, step.key_cache, step.value_cache, step.metadata, case.spec)
    expected = dense(case, step).to(torch.bfloat16)
    torch.testing.assert_close(out[: case.num_tokens], expected, atol=1e-5, rtol=8e-3)


def test_a_value_in_the_key_is_not_written_twice(device: torch.device) -> None:
    key = torch.randn(2, 1, 8, device=device)
    cache = torch.full((3, 2, 1, 8), float("nan"), device=device)
    slots = torch.tensor([4, 3], device=device)
    TorchAttention().write_cache(key, None, cache, cache[..., :6], slots)
    torch.testing.assert_close(cache.flatten(0, 1)[[4, 3]], key, atol=0, rtol=0)
    assert cache.flatten(0, 1)[[2, 5]].isnan().all()


def test_write_cache_skips_padding(device: torch.device) -> None:
    key = torch.randn(4, 2, 8, device=device)
    value = torch.randn(4, 2, 4, device=device)
    key_cache = torch.full((5, 3, 2, 8), float("nan"), device=device)
    value_cache = torch.full((5, 3, 2, 4), float("nan"), device=device)
    slots = torch.tensor([7, -1, 14, 3], device=device)
    TorchAttention().write_cache(key, value, key_cache, value_cache, slots)
    for cache, new in ((key_cache, key), (value_cache, value)):
        flat = cache.flatten(0, 1)
        torch.testing.assert_close(flat[[7, 14, 3]], new[[0, 2, 3]], atol=0, rtol=0)
        untouched = [s for s in range(3, 15) if s not in (7, 14, 3)]
        assert flat[untouched].isnan().all()
