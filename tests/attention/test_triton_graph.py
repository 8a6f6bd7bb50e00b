"""On a GPU: no step waits for the device, and a captured step serves other lengths when it is replayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import Case, Step, build

from model_states.attention import AttentionMetadata, TorchAttention
from model_states.attention.triton_backend import TritonAttention

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BASE = Case(rows=((0, 0),), num_heads=8, head_size=64, head_size_v=64, dtype=torch.bfloat16)
DECODE = [
    ((1, 700), (1, 90), (1, 1), (1, 333)),
    ((1, 3), (1, 900), (1, 40), (0, 0)),
    ((1, 1), (0, 0), (0, 0), (0, 0)),
]
MIXED = [
    ((30, 90), (1, 700), (1, 5), (0, 0)),
    ((1, 8), (25, 400), (5, 5), (1, 2)),
    ((32, 32), (0, 0), (0, 0), (0, 0)),
]
TOKENS, BLOCKS, COLUMNS = 40, 100, 64


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def persistent() -> Step:
    """Buffers that every case of a test is copied into, as the runner does."""
    query = torch.zeros(TOKENS, 8, 64, dtype=torch.bfloat16, device=CUDA)
    cache = torch.zeros(BLOCKS, 16, 2, 64, dtype=torch.bfloat16, device=CUDA)
    metadata = AttentionMetadata(
        torch.zeros(5, dtype=torch.int32, device=CUDA),
        torch.zeros(4, dtype=torch.int32, device=CUDA),
        torch.zeros(4, COLUMNS, dtype=torch.int32, device=CUDA),
        torch.full((TOKENS,), -1, device=CUDA),
        max_query_len=1,
        max_seq_len=1024,
    )
    return Step(query, cache, cache.clone(), metadata, None, [], [])


def fill(step: Step, rows: tuple[tuple[int, int], ...]) -> Case:
    case = BASE.but(rows=rows, padding_tokens=TOKENS - sum(query_len for query_len, _ in rows))
    new = build(case, CUDA)
    step.query.copy_(new.query)
    for old, cache in ((step.key_cache, new.key_cache), (step.value_cache, new.value_cache)):
        old.fill_(float("nan"))
        old[: cache.shape[0]] = cache
    step.metadata.query_start_loc.copy_(new.metadata.query_start_loc)
    step.metadata.seq_lens.copy_(new.metadata.seq_lens)
    step.metadata.block_table.zero_()
    step.metadata.block_table[:, : new.metadata.block_table.shape[1]] = new.metadata.block_table
    torch.cuda.synchronize()  # kernels read lengths and tables while the launch before them ends
    return case


@pytest.mark.parametrize(("steps", "max_query_len"), [(DECODE, 1), (MIXED, 32)], ids=["decode", "mixed"])
def test_replay_serves_other_lengths(steps: list[tuple[tuple[int, int], ...]], max_query_len: int) -> None:
    step = persistent()
    step.metadata.max_query_len = max_query_len
    args = (step.query, step.key_cache, step.value_cache, step.metadata, BASE.spec)
    backend = TritonAttention()
    fill(step, steps[0])
    backend.attend(*args)  # compiles, which a capture does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(*args)
    for rows in [*steps, *reversed(steps)]:
        case = fill(step, rows)
        out.fill_(float("nan"))
        graph.replay()
        expected = TorchAttention().attend(*args)
        torch.testing.assert_close(out, expected, atol=8e-3, rtol=2e-2)
        assert not out[case.num_tokens :].any()


@pytest.mark.parametrize("rows", [DECODE[0], MIXED[0]], ids=["decode", "mixed"])
def test_a_step_does_not_wait_for_the_device(
    rows: tuple[tuple[int, int], ...], request: pytest.FixtureRequest
) -> None:
    step = build(BASE.but(rows=rows), CUDA)
    backend = TritonAttention()
    key = torch.randn(step.query.shape[0], 2, 64, dtype=torch.bfloat16, device=CUDA)
    torch.cuda.synchronize()
    request.getfixturevalue("no_sync")
    backend.write_cache(key, key, step.key_cache, step.value_cache, step.metadata.slot_mapping)
    out = backend.attend(step.query, step.key_cache, step.value_cache, step.metadata, BASE.spec)
    torch.cuda.set_sync_debug_mode("default")
    assert out[: step.metadata.query_start_loc[-1]].isfinite().all()
