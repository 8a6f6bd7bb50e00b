"""Input preparation against a naive model of each request, over random steps in the asynchronous order."""

from __future__ import annotations

import pytest
import torch
from naive_world import INPUT_KERNELS, L, R, T, World, ints, run_world

from core_runner.block_tables import BlockTables
from core_runner.input_batch import InputPreparer
from core_runner.request_states import RequestStates
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import NewRequest, SchedulerOutput


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_equal_the_naive_model(device: torch.device, num_drafts: int, seed: int) -> None:
    run_world(World(device, num_drafts, seed), num_steps=60)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_the_same_with_every_kernel_in_triton(
    device: torch.device, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in INPUT_KERNELS:
        monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    monkeypatch.setattr("model_states.kernels.staged_write.use_triton", lambda tensor: True)
    run_world(World(device, num_drafts, seed=21), num_steps=6)


def test_slots_outside_the_step_keep_every_byte(device: torch.device) -> None:
    """Field report C-02's class: padding and neighbours must not reach a live slot that is not scheduled."""
    world = World(device, num_drafts=2, seed=3)
    run_world(world, 12)
    step = world.next_step()
    while step.num_reqs not in range(1, R - 1) or step.removed or step.new_requests:
        world.apply(step)
        step = world.next_step()
    world.apply(step)
    states = world.states
    arrays = (
        states.prompt_len,
        states.prefill_len,
        states.num_computed_tokens,
        states.total_len,
        states.last_sampled_tokens,
        states.all_token_ids,
    )
    others = sorted(set(range(R)) - set(step.slots.tolist()))
    before = [array[others].clone() for array in arrays]
    batch = world.preparer.prepare(step, T, R)
    garbage = torch.full((R,), 3, dtype=torch.int32, device=device)
    garbage[: step.num_reqs] = 0
    ids = torch.full((batch.num_logits,), 9, device=device)
    world.preparer.post_update(batch, ids, garbage, garbage)
    assert all(torch.equal(a[others], b) for a, b in zip(arrays, before, strict=True))


def test_batches_are_views_of_the_same_buffers(device: torch.device) -> None:
    """A graph replays addresses, so no step may bring new ones."""
    world = World(device, num_drafts=1, seed=8)

    def addresses() -> set[int]:
        step = world.next_step()
        world.apply(step)
        batch = world.preparer.prepare(step, T, R)
        tensors = [
            batch.idx_mapping,
            batch.query_start_loc,
            batch.cu_num_logits,
            batch.seq_lens,
            batch.input_ids,
        ]
        tensors += [batch.positions, *batch.block_tables, *batch.slot_mappings, batch.logits_indices]
        tensors += [batch.expanded_idx_mapping, batch.expanded_local_pos, *world.tables.tensors]
        if step.num_reqs:
            world.sample(step, batch)
        return {tensor.data_ptr() for tensor in tensors if tensor.numel()} | {batch.positions.data_ptr()}

    seen = [addresses() for _ in range(8)]
    assert len(set().union(*seen)) == max(len(found) for found in seen) > 12


def test_a_step_of_padding_alone_is_prepared(device: torch.device) -> None:
    world = World(device, num_drafts=1, seed=8)
    run_world(world, 4)  # so that every buffer holds old values
    batch = world.preparer.prepare(SchedulerOutput([], [], [], ints(), ints(), ints()), T, R)
    assert batch.idx_mapping.tolist() == [R] * R
    assert not batch.input_ids.any()
    assert not batch.positions.any()
    assert not batch.seq_lens.any()
    assert all((mapping == -1).all() for mapping in batch.slot_mappings)
    assert not any(table.any() for table in batch.block_tables)
    assert (batch.num_tokens, batch.num_logits, batch.max_query_len, batch.max_seq_len) == (0, 0, 0, 0)


def test_a_finished_prefill_at_the_length_limit_samples_without_room_to_keep_it(device: torch.device) -> None:
    """A prompt of exactly L tokens: its one sampled token has no place in the history."""
    states = RequestStates(R, L, 0, device)
    tables = BlockTables([], R, L, device)
    preparer = InputPreparer(states, tables, L, device)
    new = NewRequest("full", 0, list(range(1, L + 1)), L, SamplingParams(), 0)
    step = SchedulerOutput([], [new], [], ints([0]), ints([L]), ints([0]))
    preparer.validate(step)
    states.add(new)
    states.apply_staged_writes()
    batch = preparer.prepare(step)
    assert (batch.num_logits, batch.block_tables, batch.slot_mappings) == (1, (), ())
    one = torch.ones(1, dtype=torch.int32, device=device)
    preparer.post_update(batch, torch.tensor([777], device=device), one, one * 0)
    assert states.all_token_ids[0].tolist() == list(range(1, L + 1))
    assert not states.all_token_ids[1:].any()
    assert (states.total_len[0].item(), states.last_sampled_tokens[0].item()) == (L, 777)


@pytest.mark.gpu
def test_preparing_and_updating_never_wait_for_the_device() -> None:
    world = World(torch.device("cuda"), num_drafts=0, seed=2)
    run_world(world, 6)  # compiles every kernel
    torch.cuda.synchronize()
    for _ in range(10):
        step = world.next_step()
        world.preparer.validate(step)
        ids = torch.ones(R, dtype=torch.int64, device="cuda")
        counts = (
            torch.ones(R, dtype=torch.int32, device="cuda"),
            torch.zeros(R, dtype=torch.int32, device="cuda"),
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            world.apply(step)
            batch = world.preparer.prepare(step, T, R)
            world.preparer.post_update(batch, ids, *counts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for slot, count in zip(step.slots.tolist(), step.num_scheduled_tokens.tolist(), strict=True):
            world.live[slot].upper_bound += count
