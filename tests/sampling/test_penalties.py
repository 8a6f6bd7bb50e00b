"""Counts of ids: several tokens at once, prompt and output apart, resumes, rows that change hands."""

import pytest
import torch
from option_cases import Case, World
from sampling_reference import GARBAGE

from core_runner.sampling.kernels import penalties
from core_runner.sampling.option_rows import IN_PROMPT, SEEN_ROW
from core_runner.sampling_params import SamplingParams as Params

PENALIZED = Params(presence_penalty=0.5)


@pytest.fixture(params=["torch", "triton"])
def count(request):
    """Brings the counts of a world's slots up to date."""
    run = getattr(penalties, f"count_tokens_{request.param}")

    def count_all(world):
        rows = world.options.rows(world.batch(), world.num_logits)
        run(world.batch().idx_mapping, rows.options, rows.seen, rows.seen_bits, world.history)

    return count_all


def seen(world, index):
    """Counts of the case at `index`, by id, without those that are 0."""
    rows = world.options.rows(world.batch(), world.num_logits)
    row = int(rows.options[world.slots[index], SEEN_ROW])
    return {i: n for i, n in enumerate(rows.seen[row].tolist()) if n}


def expected(case, vocab_size=20):
    counts = {i: case.output.count(i) + IN_PROMPT * (i in case.prompt) for i in range(vocab_size)}
    return {i: n for i, n in counts.items() if n}


def append(world, index, tokens):
    """What a step does to the history of a case."""
    slot, case = world.slots[index], world.cases[index]
    end = len(case.tokens)
    world.history.all_token_ids[slot, end : end + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    world.history.total_len[slot] = end + len(tokens)
    case.output = [*case.output, *tokens]


def test_prompt_and_output_are_told_apart(device, count):
    cases = [
        Case(PENALIZED, [1, 1, 2, 3], [3, 3, 5, 3]),  # a resume
        Case(Params(), [1, 2]),
        Case(Params(repetition_penalty=1.1), [4]),  # an admission
        Case(Params(frequency_penalty=-1), [7, 7], [7]),
    ]
    for case in cases:
        case.output = list(case.output)
    world = World(cases, 20, device)
    count(world)
    assert [seen(world, i) for i in (0, 2, 3)] == [expected(cases[i]) for i in (0, 2, 3)]


def test_every_accepted_token_is_counted_once(device, count):
    cases = [Case(PENALIZED, [1, 2], []), Case(PENALIZED, [2], []), Case(PENALIZED, [0, 4, 4], [])]
    world = World(cases, 20, device)
    for accepted in ([[3], [3, 3, 3, 5], []], [[3, 4, 3], [3], [19]], [[], [], []], [[1], [1, 1], [0, 0]]):
        for index, tokens in enumerate(accepted):
            append(world, index, tokens)
        count(world)
        count(world)
        assert [seen(world, i) for i in range(3)] == [expected(case) for case in cases]


def test_long_histories(device, count):
    world = World([Case(PENALIZED, [1], [])], 20, device)
    length = 2500
    tokens = torch.randint(0, 20, (1, length), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    rows = world.options.rows(world.batch(), 1)
    history = world.history._replace(
        all_token_ids=tokens.to(device).expand(len(world.slots) + 1, -1).contiguous(),
        total_len=torch.full_like(world.history.total_len, length),
        prompt_len=torch.full_like(world.history.prompt_len, 1500),
    )
    world.history = history
    count(world)
    outputs, prompt = tokens[0, 1500:].tolist(), tokens[0, :1500].tolist()
    assert rows.seen is not None
    assert seen(world, 0) == {i: outputs.count(i) + IN_PROMPT * (i in prompt) for i in range(20)}


def test_ids_outside_the_vocabulary_harm_nobody(device, count):
    """A poisoned history, or a prompt of ids that are never sampled, must not write beside the row."""
    world = World([Case(PENALIZED, [1, 25], [GARBAGE, 2]), Case(PENALIZED, [3], [3])], 20, device)
    count(world)
    assert seen(world, 0) == {1: IN_PROMPT, 2: 1}
    assert seen(world, 1) == {3: IN_PROMPT + 1}


def test_a_row_that_changes_hands_starts_at_zero(device, count):
    """Also while the table grows: rows of those who stay keep their counts."""
    cases = [Case(PENALIZED, [1, 2], [3]) for _ in range(3)]
    world = World(cases, 20, device, num_spare_slots=9)
    count(world)
    world.states.remove(world.slots[1])
    newcomer = Case(PENALIZED, [9], [9, 9])
    for slot in (world.slots[1], *world.slots[3:]):
        world.history.all_token_ids[slot, :3] = torch.tensor(newcomer.tokens, dtype=torch.int32)
        world.history.total_len[slot], world.history.prompt_len[slot] = 3, 1
        world.states.add(slot, PENALIZED, 0)
    world.states.apply_staged_writes()
    world.cases = [cases[0], newcomer, cases[2], *[newcomer] * 9]
    count(world)
    assert [seen(world, i) for i in range(12)] == [expected(case) for case in world.cases]


def test_unused_means_no_table(device):
    world = World([Case(Params(temperature=0.5), [1])], 20, device)
    assert world.options.rows(world.batch(), 1) is None
    assert world.options._seen.tensor is None
