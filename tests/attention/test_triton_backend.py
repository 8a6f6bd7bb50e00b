"""The Triton kernels against the torch backend and their twins: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, Step, build

import model_states.kernels.paged_attention_decode as decode_module
import model_states.kernels.paged_attention_prefill as prefill_module
from model_states.attention import AttentionSpec, TorchAttention
from model_states.attention.triton_backend import TritonAttention
from model_states.kernels.paged_attention_decode import (
    DecodeConfig,
    decode_config,
    paged_attention_decode,
    paged_attention_decode_torch,
    paged_attention_decode_triton,
    scratch_sizes,
    short_query_len,
)
from model_states.kernels.paged_attention_prefill import (
    PrefillConfig,
    packed_heads,
    paged_attention_prefill,
    paged_attention_prefill_torch,
    paged_attention_prefill_triton,
    prefill_config,
)
from model_states.kernels.write_cache import write_cache, write_cache_torch, write_cache_triton

# The interpreter's matrix product does not know bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
MIXED = Case(rows=((1, 37), (20, 31), (1, 3), (3, 9)))
DECODE = Case(rows=((1, 37), (1, 16), (1, 1)))
VERIFY = Case(rows=((4, 37), (1, 16), (2, 2)))
PREFILL = Case(rows=((20, 20), (17, 40)))


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    atol, rtol = (2e-5, 1e-4) if dtype == torch.float32 else (8e-3, 2e-2)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


def run(case: Case, device: torch.device) -> None:
    step = build(case, device)
    args = (step.query, step.key_cache, step.value_cache, step.metadata, case.spec, step.sinks)
    out = TritonAttention().attend(*args)
    close(out, TorchAttention().attend(*args), case.dtype)
    assert not out[case.num_tokens :].any()


@pytest.mark.parametrize(
    "rows", [MIXED, DECODE, VERIFY, PREFILL], ids=["mixed", "decode", "verify", "prefill"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 6},
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 8, "num_kv_heads": 1},
        {"window": 1},
        {"window": 7},
        {"window": 17},
        {"soft_cap": 2.0},
        {"sinks": True},
        {"sinks": True, "soft_cap": 20.0, "window": 9, "block_size": 32},
        {"dtype": HALF},
    ],
    ids=str,
)
def test_equals_the_torch_backend(rows: Case, changes: dict[str, object], device: torch.device) -> None:
    run(rows.but(**changes), device)


def test_more_heads_of_a_kv_head_than_a_program_takes(device: torch.device) -> None:
    run(Case(rows=((1, 37), (1, 3), (3, 9)), num_heads=36, num_kv_heads=2), device)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("head_size", "head_size_v"), [(8, 8), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128)]
)
def test_head_sizes(head_size: int, head_size_v: int, dtype: torch.dtype, device: torch.device) -> None:
    case = MIXED.but(num_heads=2, num_kv_heads=1, head_size=head_size, head_size_v=head_size_v, dtype=dtype)
    run(case.but(rows=((1, 19), (4, 18))), device)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 18, "block_size": 4},
        {"num_heads": 6, "num_kv_heads": 2, "head_size": 40, "head_size_v": 40},
        {"head_size": 45, "head_size_v": 20, "dtype": HALF},
        {"window": 7, "sinks": True, "soft_cap": 20.0},
    ],
    ids=str,
)
def test_values_that_are_a_part_of_the_key(changes: dict[str, object], device: torch.device) -> None:
    shared = MIXED.but(num_kv_heads=1, head_size=24, head_size_v=16, value_from_key=True)
    run(shared.but(**changes), device)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("num_heads", [4, 40])
def test_widest_heads_share_key_and_value(num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    widest = Case(rows=((1, 20), (3, 9), (1, 200)), num_heads=num_heads, num_kv_heads=1, dtype=dtype)
    run(widest.but(head_size=576, head_size_v=512, value_from_key=True), device)


def test_rows_without_a_query_and_padding(device: torch.device) -> None:
    run(MIXED.but(rows=((0, 0), (1, 9), (2, 5), (0, 0), (0, 0)), padding_tokens=40), device)
    run(DECODE.but(rows=((1, 20), (0, 0), (1, 9), (0, 0)), padding_tokens=9), device)
    run(Case(rows=((0, 0), (0, 0)), padding_tokens=3), device)


def test_several_tiles_of_several_rows(device: torch.device) -> None:
    run(PREFILL.but(rows=((35, 50), (1, 4), (67, 67), (2, 2)), num_heads=2, num_kv_heads=1), device)
    run(PREFILL.but(rows=((67, 67),), num_heads=2, num_kv_heads=1, window=20), device)


def poisoned(step: Step, case: Case, value: float = float("nan")) -> torch.Tensor:
    return torch.full(
        (step.query.shape[0], case.num_heads, case.head_size_v),
        value,
        dtype=case.dtype,
        device=step.query.device,
    )


def arguments(step: Step, case: Case) -> tuple[Any, ...]:
    return step.query, step.key_cache, step.value_cache, step.metadata, case.spec, step.sinks


def decode_in_parts(case: Case, config: DecodeConfig, step: Step) -> torch.Tensor:
    out = poisoned(step, case)
    size, counters = scratch_sizes(step.metadata, case.spec, config)
    scratch = torch.full((size,), float("nan"), device=step.query.device)
    arrived = torch.zeros(counters, dtype=torch.int32, device=step.query.device)
    paged_attention_decode_triton(out, *arguments(step, case), config, scratch, arrived)
    assert not arrived.any()  # as the next launch wants them
    return out


@pytest.mark.parametrize(("budget", "min_part"), [(1, 1000), (3, 16), (9, 16)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 33, "sinks": True},
        {"num_heads": 3, "num_kv_heads": 1},
        {"num_heads": 36, "num_kv_heads": 2, "sinks": True, "rows": ((1, 40), (1, 2))},
        {"num_kv_heads": 1, "head_size": 24, "value_from_key": True},
        {"rows": ((4, 90), (0, 0), (8, 8), (2, 33))},
        {"rows": ((8, 60),), "window": 5},
        {"rows": ((1, 90),), "soft_cap": 2.0},
    ],
    ids=str,
)
def test_split_decode_equals_its_twin(
    budget: int, min_part: int, changes: dict[str, object], device: torch.device
) -> None:
    case = Case(rows=((1, 100), (1, 40), (0, 0), (1, 2)), head_size_v=8).but(**changes)
    step = build(case, device)
    expected = poisoned(step, case)
    config = DecodeConfig(budget, min_part, block_n=16, num_stages=2)
    paged_attention_decode_torch(expected, *arguments(step, case), short_query_len(case.spec, config))
    close(decode_in_parts(case, config, step), expected, case.dtype)


def test_more_rows_than_a_search_reads_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decode_module, prefill_module):
        monkeypatch.setattr(module, "searched_rows", lambda num_reqs: 4)
    rows = ((1, 9), (0, 0), (12, 30), (1, 70), (1, 1), (2, 3), (40, 40), (0, 0), (1, 33), (11, 11), (0, 0))
    case = Case(rows=rows, num_heads=2, num_kv_heads=1)
    step = build(case, device)
    out = decode_in_parts(case, DecodeConfig(3, 16, block_n=16, num_stages=2), step)
    paged_attention_prefill_triton(out, *arguments(step, case), 8, PrefillConfig(32, 16, 4, 2))
    close(out, TorchAttention().attend(*arguments(step, case)), case.dtype)


@pytest.mark.parametrize("short", [1, 4, 8])
def test_kernels_leave_the_rows_of_the_other_alone(short: int, device: torch.device) -> None:
    case = MIXED.but(num_heads=32 // short, rows=((1, 37), (9, 21), (1, 3), (4, 30)))
    step = build(case, device)
    config = DecodeConfig(2, 16, 16)
    assert short_query_len(case.spec, config) == short
    prefill, twin = poisoned(step, case, 7.0), poisoned(step, case, 7.0)
    paged_attention_prefill_triton(prefill, *arguments(step, case), short, PrefillConfig(32, 16, 4, 2))
    paged_attention_prefill_torch(twin, *arguments(step, case), short)
    close(prefill, twin, case.dtype)
    decode, twin = decode_in_parts(case, config, step), poisoned(step, case)
    paged_attention_decode_torch(twin, *arguments(step, case), short)
    torch.testing.assert_close(decode, twin, atol=2e-5, rtol=1e-4, equal_nan=True)
    own = torch.tensor([True] + [False] * 9 + [True] + [short >= 4] * 4 + [False] * 2, device=device)
    assert ((prefill == 7.0).flatten(1).all(1) == own)[:-2].all()
    assert (decode.isfinite().flatten(1).all(1) == own).all()


def test_wrappers_take_the_kernel_that_fits_the_device(device: torch.device) -> None:
    case = MIXED.but(rows=((1, 37), (11, 21), (1, 3)))
    step, config = build(case, device), DecodeConfig(1, 128)
    out, short = poisoned(step, case), short_query_len(case.spec, config)
    size, counters = scratch_sizes(step.metadata, case.spec, config)
    scratch = torch.empty(size, device=device)
    arrived = torch.zeros(counters, dtype=torch.int32, device=device)
    paged_attention_prefill(out, *arguments(step, case), short, PrefillConfig(32, 16, 4, 2))
    paged_attention_decode(out, *arguments(step, case), config, scratch, arrived)
    close(out, TorchAttention().attend(*arguments(step, case)), case.dtype)


@pytest.mark.parametrize("fill", [1, 264])
def test_a_program_goes_on_with_the_tiles_that_are_left(
    fill: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_module, "_FILL", fill)
    case = MIXED.but(rows=((9, 21), (17, 17), (9, 9), (30, 50), (0, 0)), padding_tokens=70)
    step = build(case, device)
    out = poisoned(step, case)
    paged_attention_prefill_triton(out, *arguments(step, case), 8, PrefillConfig(32, 16, 4, 2))
    close(out, TorchAttention().attend(*arguments(step, case)), case.dtype)


def test_scratch_is_kept_and_grown(device: torch.device) -> None:
    backend = TritonAttention()
    for rows in (((1, 300),), ((1, 140), (1, 290))):
        case = Case(rows=rows, num_heads=2, num_kv_heads=1)
        step = build(case, device)
        args = (step.query, step.key_cache, step.value_cache, step.metadata, case.spec)
        close(backend.attend(*args), TorchAttention().attend(*args), case.dtype)
    assert len(backend._outgrown) == 1
    held = [tensor.data_ptr() for tensor in backend._scratch[step.query.device]]
    backend.attend(*args)
    assert [tensor.data_ptr() for tensor in backend._scratch[step.query.device]] == held


def test_queries_may_be_strided(device: torch.device) -> None:
    step = build(MIXED, device)
    fused = torch.full(
        (step.query.shape[0], MIXED.num_heads + 4, MIXED.head_size), float("nan"), device=device
    )
    fused[:, : MIXED.num_heads] = step.query
    by_head = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    args = (step.key_cache, step.value_cache, step.metadata, MIXED.spec)
    expected = TorchAttention().attend(step.query, *args)
    for query in (fused[:, : MIXED.num_heads], by_head):
        close(TritonAttention().attend(query, *args), expected, MIXED.dtype)


@pytest.mark.parametrize("cache_dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("heads", "size", "size_v"), [(2, 16, 8), (3, 80, 80), (20, 192, 128)])
def test_write_cache(
    heads: int, size: int, size_v: int, cache_dtype: torch.dtype, device: torch.device
) -> None:
    gen = torch.Generator().manual_seed(3)
    key = (
        torch.randn(heads, 5, size, generator=gen).to(device).transpose(0, 1)
    )  # strided, as after a rotation
    value = torch.randn(5, heads, size_v, generator=gen).to(device)
    slots = torch.tensor([9, -1, 17, 4, -1], device=device)
    caches = []
    for write in (write_cache_torch, write_cache_triton, write_cache, TritonAttention().write_cache):
        key_cache = torch.full((5, 4, heads, size), float("nan"), dtype=cache_dtype, device=device)
        value_cache = torch.full((5, 4, heads, size_v), float("nan"), dtype=cache_dtype, device=device)
        write(key, value, key_cache, value_cache, slots)
        caches.append((key_cache[1:], value_cache[1:]))  # block 0 is the null block, nobody's
    for written in caches[1:]:
        torch.testing.assert_close(written, caches[0], atol=0, rtol=0, equal_nan=True)
    assert caches[0][0].isnan().logical_not().sum() == 3 * heads * size


def test_a_value_in_the_key_is_not_written_twice(device: torch.device) -> None:
    key = torch.randn(3, 1, 24, device=device)
    slots = torch.tensor([9, -1, 17], device=device)
    caches = []
    for write in (write_cache_torch, write_cache_triton, TritonAttention().write_cache):
        cache = torch.full((5, 4, 1, 24), float("nan"), device=device)
        write(key, None, cache, cache[..., :16], slots)
        caches.append(cache[1:])
    for written in caches[1:]:
        torch.testing.assert_close(written, caches[0], atol=0, rtol=0, equal_nan=True)
    assert caches[0].isnan().logical_not().sum() == 2 * 24


def test_nothing_to_write(device: torch.device) -> None:
    cache = torch.ones(2, 4, 1, 8, device=device)
    empty = torch.empty(0, 1, 8, device=device)
    write_cache_triton(empty, empty, cache, cache, torch.empty(0, dtype=torch.int64, device=device))
    assert (cache == 1).all()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "pack"), [(4, 4, 1), (14, 2, 1), (12, 2, 2), (16, 2, 8), (32, 1, 8)]
)
def test_packed_heads_divide_the_group(num_heads: int, num_kv_heads: int, pack: int) -> None:
    assert packed_heads(AttentionSpec(num_heads, num_kv_heads, 64, 64, 1.0)) == pack


def test_configs_follow_sizes() -> None:
    spec = AttentionSpec(16, 8, 128, 128, 1.0)
    few, many = decode_config(1, spec, 2), decode_config(256, spec, 2)
    assert few.min_part < many.min_part
    assert few.budget == many.budget == 66
    assert short_query_len(spec, many) == 8
    shared = AttentionSpec(128, 1, 576, 512, 1.0, value_from_key=True)
    assert decode_config(4, shared, 2).block_m == 16
    assert decode_config(256, shared, 2).block_m == 64
    assert decode_config(256, shared, 4).block_m == 16
    assert short_query_len(shared, decode_config(256, shared, 2)) == 1
    long, short = prefill_config(8192, spec, 2), prefill_config(128, spec, 2)
    assert long.block_m > short.block_m
    assert prefill_config(8192, shared, 2).block_n < long.block_n
    assert prefill_config(128, spec, 4).block_m < short.block_m


def test_what_is_not_supported_is_said() -> None:
    backend = TritonAttention()
    cuda = torch.device("cuda")
    good = AttentionSpec(4, 2, 64, 64, 1.0)
    assert backend.unsupported(good, 16, torch.bfloat16, cuda) is None
    assert "head size 512" in str(
        backend.unsupported(AttentionSpec(4, 2, 512, 64, 1.0), 16, torch.bfloat16, cuda)
    )
    shared = AttentionSpec(128, 1, 576, 512, 1.0, value_from_key=True)
    assert backend.unsupported(shared, 16, torch.bfloat16, cuda) is None
    wider = AttentionSpec(128, 1, 700, 512, 1.0, value_from_key=True)
    assert "512 + 188" in str(backend.unsupported(wider, 16, torch.bfloat16, cuda))
    assert "float64" in str(backend.unsupported(good, 16, torch.float64, cuda))
    assert "num_heads=4" in str(
        backend.unsupported(AttentionSpec(4, 3, 64, 64, 1.0), 16, torch.float16, cuda)
    )
