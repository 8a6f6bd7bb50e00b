"""The Triton kernels against the torch backend and their twins: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, Step, build

from model_states.attention import AttentionSpec, TorchAttention
from model_states.attention.triton_backend import TritonAttention
from model_states.kernels.paged_attention_decode import (
    DecodeConfig,
    decode_config,
    paged_attention_decode,
    paged_attention_decode_torch,
    paged_attention_decode_triton,
    scratch_size,
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
MIXED = Case(rows=((1, 37), (5, 21), (1, 3)))
DECODE = Case(rows=((1, 37), (1, 16), (1, 1)))
PREFILL = Case(rows=((20, 20), (3, 40)))


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    atol, rtol = (2e-5, 1e-4) if dtype == torch.float32 else (8e-3, 2e-2)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


def run(case: Case, device: torch.device) -> None:
    step = build(case, device)
    args = (step.query, step.key_cache, step.value_cache, step.metadata, case.spec, step.sinks)
    out = TritonAttention().attend(*args)
    close(out, TorchAttention().attend(*args), case.dtype)
    assert not out[case.num_tokens :].any()


@pytest.mark.parametrize("rows", [MIXED, DECODE, PREFILL], ids=["mixed", "decode", "prefill"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 6},
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 8, "num_kv_heads": 1},
        {"num_heads": 18, "num_kv_heads": 1},
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


def decode_in_parts(case: Case, config: DecodeConfig, step: Step) -> torch.Tensor:
    out = torch.full(
        (step.query.shape[0], case.num_heads, case.head_size_v), float("nan"), device=step.query.device
    )
    size = scratch_size(len(case.rows), case.spec, config)
    scratch = torch.full((size,), float("nan"), device=step.query.device)
    paged_attention_decode_triton(
        *(out, step.query, step.key_cache, step.value_cache, step.metadata, case.spec, step.sinks),
        scratch,
        config,
    )
    return out


@pytest.mark.parametrize("num_splits", [1, 2, 3, 12])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 33, "sinks": True},
        {"num_heads": 3, "num_kv_heads": 1},
        {"num_kv_heads": 1, "head_size": 24, "value_from_key": True},
    ],
    ids=str,
)
def test_split_decode_equals_its_twin(
    num_splits: int, changes: dict[str, object], device: torch.device
) -> None:
    case = Case(rows=((1, 170), (1, 40), (0, 0), (1, 2)), head_size_v=8).but(**changes)
    step = build(case, device)
    expected = torch.full(
        (step.query.shape[0], case.num_heads, case.head_size_v), float("nan"), device=device
    )
    paged_attention_decode_torch(
        expected, step.query, step.key_cache, step.value_cache, step.metadata, case.spec, step.sinks
    )
    config = DecodeConfig(num_splits, min_split=16, block_n=16, num_stages=2)
    close(decode_in_parts(case, config, step), expected, case.dtype)


def test_kernels_leave_the_rows_of_the_other_alone(device: torch.device) -> None:
    step = build(MIXED, device)
    args = (step.query, step.key_cache, step.value_cache, step.metadata, MIXED.spec, None)
    poison = torch.full((step.query.shape[0], MIXED.num_heads, MIXED.head_size_v), 7.0, device=device)
    prefill, twin = poison.clone(), poison.clone()
    paged_attention_prefill_triton(prefill, *args, PrefillConfig(32, 16, 4, 2))
    paged_attention_prefill_torch(twin, *args)
    close(prefill, twin, MIXED.dtype)
    assert (prefill[[0, 6]] == 7.0).all()
    decode = decode_in_parts(MIXED, DecodeConfig(2, 16, 16), step)
    assert decode[1:6].isnan().all()
    assert decode[[0, 6]].isfinite().all()


def test_wrappers_take_the_kernel_that_fits_the_device(device: torch.device) -> None:
    step = build(MIXED, device)
    args = (step.query, step.key_cache, step.value_cache, step.metadata, MIXED.spec, None)
    out = torch.full((step.query.shape[0], MIXED.num_heads, MIXED.head_size_v), float("nan"), device=device)
    paged_attention_prefill(out, *args, PrefillConfig(32, 16, 4, 2))
    config = DecodeConfig(1, 128)
    paged_attention_decode(
        out, *args, torch.empty(scratch_size(3, MIXED.spec, config), device=device), config
    )
    close(out, TorchAttention().attend(*args), MIXED.dtype)


def test_scratch_is_kept_and_grown(device: torch.device) -> None:
    backend = TritonAttention()
    for rows in (((1, 300),), ((1, 140), (1, 290))):
        case = Case(rows=rows, num_heads=2, num_kv_heads=1)
        step = build(case, device)
        args = (step.query, step.key_cache, step.value_cache, step.metadata, case.spec)
        close(backend.attend(*args), TorchAttention().attend(*args), case.dtype)
    assert len(backend._outgrown) == 1
    held = backend._scratch[step.query.device].data_ptr()
    backend.attend(*args)
    assert backend._scratch[step.query.device].data_ptr() == held


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


def test_configs_follow_the_bounds() -> None:
    spec = AttentionSpec(16, 8, 128, 128, 1.0)
    assert decode_config(256, spec, 200, 2).num_splits == 1
    assert decode_config(256, spec, 40960, 2).num_splits == 2
    assert decode_config(1, spec, 40960, 2).num_splits == 64
    window = AttentionSpec(16, 8, 128, 128, 1.0, sliding_window=100)
    assert decode_config(1, window, 40960, 2).num_splits == 1
    shared = AttentionSpec(128, 1, 576, 512, 1.0, value_from_key=True)
    assert decode_config(256, shared, 40960, 2).num_splits == 1
    assert decode_config(4, shared, 40960, 2).num_splits == 64
    assert decode_config(4, shared, 40960, 4).block_m == 16
    assert prefill_config(4096, shared, 2).block_m == 64
    assert prefill_config(4, spec, 2).block_m == 16
    assert prefill_config(20, spec, 2).block_m == 64
    assert prefill_config(4096, spec, 2).block_m == 128


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
