"""Input-preparation kernels: Triton equals the torch twin, on poisoned outputs and garbage in the padding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from core_runner.kernels import (
    expand_idx_mapping,
    gather_block_tables,
    merge_tokens,
    positions,
    post_update,
    prefill_tokens,
    slot_mapping,
)

POISON = -77
NUM_SLOTS, MAX_MODEL_LEN = 8, 1501  # the last slot is the null slot


@dataclass
class Step:
    """A batch over `NUM_SLOTS` slots: 4 real rows and `num_padding` rows of the null slot."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    num_computed: torch.Tensor
    prefill_len: torch.Tensor
    history: torch.Tensor
    last_sampled: torch.Tensor
    drafts: torch.Tensor
    num_tokens: int

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=dtype, device=self.idx_mapping.device)


@pytest.fixture(params=[0, 3], ids=["exact", "padded"])
def step(request: pytest.FixtureRequest, device: torch.device) -> Step:
    """A long chunk, a last chunk, a decode row without drafts and one with two, in shuffled slots."""
    generator = torch.Generator().manual_seed(7)
    padding = request.param

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(1, 50_000, shape, generator=generator, dtype=torch.int32).to(device)

    # Rows by slot 5, 0, 3, 6; every other slot holds garbage.
    query_start_loc = [0, 1301, 1304, 1305, 1308]
    cu_num_logits = [0, 0, 1, 2, 5]
    num_computed, prefill_len = random(NUM_SLOTS), random(NUM_SLOTS)
    for slot, computed, known in ((5, 17, 1400), (0, 2, 5), (3, 9, 9), (6, 31, 20)):
        num_computed[slot], prefill_len[slot] = computed, known
    return Step(
        idx_mapping=ints([5, 0, 3, 6] + [NUM_SLOTS - 1] * padding),
        query_start_loc=ints(query_start_loc + query_start_loc[-1:] * padding),
        cu_num_logits=ints(cu_num_logits + cu_num_logits[-1:] * padding),
        num_computed=num_computed,
        prefill_len=prefill_len,
        history=random(NUM_SLOTS, MAX_MODEL_LEN),
        last_sampled=random(NUM_SLOTS),
        drafts=random(NUM_SLOTS, 3),
        num_tokens=query_start_loc[-1] + (1033 if padding else 0),
    )


def test_positions(step: Step) -> None:
    num_rows, results = len(step.idx_mapping), []
    for op in (positions.positions_torch, positions.positions_triton):
        out, seq_lens = step.poisoned(step.num_tokens), step.poisoned(num_rows, dtype=torch.int32)
        op(step.idx_mapping, step.query_start_loc, step.num_computed, out, seq_lens)
        results.append((out, seq_lens))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    out, seq_lens = (t.tolist() for t in results[0])
    assert seq_lens == [1318, 5, 10, 34] + [0] * (num_rows - 4)
    assert out[:1308] == [*range(17, 1318), 2, 3, 4, 9, 31, 32, 33]
    assert set(out[1308:]) <= {0}


def test_prefill_tokens(step: Step) -> None:
    results = []
    for op in (prefill_tokens.prefill_tokens_torch, prefill_tokens.prefill_tokens_triton):
        out = step.poisoned(step.num_tokens)
        op(step.idx_mapping, step.query_start_loc, step.num_computed, step.prefill_len, step.history, out)
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    history = step.history.tolist()
    expected = history[5][17:1318] + history[0][2:5] + [POISON] * 4 + [0] * (step.num_tokens - 1308)
    assert results[0].tolist() == expected


def test_merge_tokens(step: Step) -> None:
    results = []
    for op in (merge_tokens.merge_tokens_torch, merge_tokens.merge_tokens_triton):
        out = step.poisoned(step.num_tokens)
        op(
            step.idx_mapping,
            step.query_start_loc,
            step.cu_num_logits,
            step.num_computed,
            step.prefill_len,
            step.last_sampled,
            step.drafts,
            out,
        )
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    last, drafts = step.last_sampled.tolist(), step.drafts.tolist()
    expected = [POISON] * 1304 + [last[3], last[6], *drafts[6][:2]] + [POISON] * (step.num_tokens - 1308)
    assert results[0].tolist() == expected


@pytest.mark.parametrize("spare", [0, 70])
def test_expand_idx_mapping(step: Step, spare: int) -> None:
    results = []
    for op in (expand_idx_mapping.expand_idx_mapping_torch, expand_idx_mapping.expand_idx_mapping_triton):
        slots, local = (step.poisoned(5 + spare, dtype=torch.int32) for _ in range(2))
        indices = step.poisoned(5 + spare)
        op(
            step.idx_mapping,
            step.query_start_loc,
            step.cu_num_logits,
            slots,
            local,
            indices,
            NUM_SLOTS - 1,
        )
        results.append((slots, local, indices))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    slots, local, indices = (t.tolist() for t in results[0])
    assert slots == [0, 3, 6, 6, 6] + [NUM_SLOTS - 1] * spare
    assert local == [0, 0, 0, 1, 2] + [0] * spare
    assert indices == [1303, 1304, 1305, 1306, 1307] + [0] * spare


@pytest.mark.parametrize("max_blocks", [1, 37, 1100])
def test_gather_block_tables(step: Step, max_blocks: int) -> None:
    table = torch.arange(NUM_SLOTS * max_blocks, dtype=torch.int32, device=step.idx_mapping.device)
    table = table.view(NUM_SLOTS, max_blocks) + 1
    table[-1] = 0
    results = []
    for op in (gather_block_tables.gather_block_tables_torch, gather_block_tables.gather_block_tables_triton):
        # The batch's rows are the first of a larger buffer, whose rest must stay as it is.
        buffer = step.poisoned(len(step.idx_mapping) + 2, max_blocks, dtype=torch.int32)
        op(table, step.idx_mapping, buffer[:-2])
        assert (buffer[-2:] == POISON).all()
        results.append(buffer[:-2])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], table[step.idx_mapping.long()], rtol=0, atol=0)


@pytest.mark.parametrize(("block_size", "columns"), [(16, 94), (1, 1501), (16, 2)])
def test_slot_mapping(step: Step, block_size: int, columns: int) -> None:
    num_rows, dev = len(step.idx_mapping), step.idx_mapping.device
    table = torch.randint(1, 2**27, (num_rows, columns), dtype=torch.int32).to(dev)
    pos, seq_lens = step.poisoned(step.num_tokens), step.poisoned(num_rows, dtype=torch.int32)
    positions.positions_torch(step.idx_mapping, step.query_start_loc, step.num_computed, pos, seq_lens)
    pos[1305] = -1  # what a poisoned slot makes of a position
    results = []
    for op in (slot_mapping.slot_mapping_torch, slot_mapping.slot_mapping_triton):
        out = step.poisoned(step.num_tokens)
        op(table, step.query_start_loc, pos, block_size, out)
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    rows = [0] * 1301 + [1] * 3 + [2] + [3] * 3
    host_table, host_pos = table.tolist(), pos.tolist()
    expected = [
        host_table[b][p // block_size] * block_size + p % block_size if 0 <= p < columns * block_size else -1
        for b, p in zip(rows, host_pos, strict=False)
    ]
    assert results[0].tolist() == expected + [-1] * (step.num_tokens - 1308)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("short", [False, True], ids=["all rows", "real rows only"])
def test_post_update(step: Step, id_dtype: torch.dtype, short: bool) -> None:
    dev, num_rows = step.idx_mapping.device, len(step.idx_mapping)
    token_ids = torch.tensor([101, 102, 103, 104, 105], dtype=id_dtype, device=dev)
    garbage = [] if short else [9] * (num_rows - 4)
    num_sampled = torch.tensor([5, 1, 1, 2, *garbage], dtype=torch.int32, device=dev)  # row 0 has no logits
    num_rejected = torch.tensor([0, 0, 0, 1, *garbage], dtype=torch.int32, device=dev)
    total_len = torch.randint(0, MAX_MODEL_LEN, (NUM_SLOTS,), dtype=torch.int32).to(dev)
    for slot, total in ((5, 1400), (0, 5), (3, MAX_MODEL_LEN), (6, 32)):
        total_len[slot] = total
    results = []
    for op in (post_update.post_update_torch, post_update.post_update_triton):
        states = [t.clone() for t in (step.history, total_len, step.last_sampled, step.num_computed)]
        op(
            step.idx_mapping,
            step.query_start_loc,
            step.cu_num_logits,
            token_ids,
            num_sampled,
            num_rejected,
            *states,
            4,
        )
        # Whatever is written for nobody may only go to the null slot's history.
        results.append([states[0][:-1], *states[1:]])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    history, total, last, computed = (
        t.clone() for t in (step.history, total_len, step.last_sampled, step.num_computed)
    )
    history[0, 5], history[6, 32], history[6, 33] = 101, 103, 104  # slot 3's history is full
    total[0], total[6] = 6, 34
    last[0], last[3], last[6] = 101, 102, 104
    computed[[5, 0, 3, 6]] = torch.tensor([1318, 5, 10, 33], dtype=torch.int32, device=dev)
    expected = [history[:-1], total, last, computed]
    torch.testing.assert_close(results[0], expected, rtol=0, atol=0)


def test_post_update_of_a_step_that_samples_nothing(device: torch.device) -> None:
    one = torch.ones(1, dtype=torch.int32, device=device)
    for op in (post_update.post_update_torch, post_update.post_update_triton):
        starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
        history = torch.full((3, 9), POISON, dtype=torch.int32, device=device)
        total, last, computed = (torch.tensor([9, 6, 0], dtype=torch.int32, device=device) for _ in range(3))
        empty = torch.empty(0, dtype=torch.int64, device=device)
        op(one, starts, torch.zeros_like(starts), empty, one * 0, one * 0, history, total, last, computed, 1)
        assert (history[:2] == POISON).all()
        assert (total.tolist(), last.tolist(), computed.tolist()) == ([9, 6, 0], [9, 6, 0], [9, 10, 0])


def test_a_batch_of_padding_alone(device: torch.device) -> None:
    """A warm-up step: no row is real, and every output is the null slot's."""
    starts = torch.zeros(3, dtype=torch.int32, device=device)
    rows = torch.full((2,), NUM_SLOTS - 1, dtype=torch.int32, device=device)
    garbage = torch.full((NUM_SLOTS,), 123_456, dtype=torch.int32, device=device)
    for op in (positions.positions_torch, positions.positions_triton):
        out = torch.full((5,), POISON, dtype=torch.int64, device=device)
        seq_lens = torch.full((2,), POISON, dtype=torch.int32, device=device)
        op(rows, starts, garbage, out, seq_lens)
        assert (out.tolist(), seq_lens.tolist()) == ([0] * 5, [0, 0])
