"""A seeded request gives the same ids whatever its batch, slot and chunks (field report A-01)."""

from __future__ import annotations

from typing import Any

import pytest
from support.drained import Drained
from support.toy_model import ToyPlugin, ToyTable, save_toy

from core_runner import LLM, SamplingParams

PROMPT = [7, 3, 11, 20, 6, 41]
SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
OTHER_SEED = SamplingParams(temperature=1.3, seed=7, top_k=5, logprobs=1, max_tokens=20, ignore_eos=True)
MIXED = [GREEDY, UNSEEDED, OTHER_SEED, UNSEEDED, GREEDY, OTHER_SEED, UNSEEDED]

# name -> parameters of the neighbours before and after the seeded request
BATCHES: dict[str, tuple[list[SamplingParams], list[SamplingParams]]] = {
    "alone": ([], []),
    "an unseeded neighbour": ([], [UNSEEDED]),
    "another slot": ([UNSEEDED], []),
    "mixed neighbours before": (MIXED, []),
    "mixed neighbours after": ([], MIXED),
    "mixed neighbours around": (MIXED[:3], MIXED[3:]),
}


@pytest.fixture(scope="module")
def close_logits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = save_toy(tmp_path_factory.mktemp("close"), 50)
    plugins = [ToyPlugin(ToyTable(50, scale=0.3, seed=1))]
    return {"model": directory, "plugins": plugins, "device": "cpu", "max_num_reqs": 8}


def _run(llm: LLM, batch: str) -> list[list[int]]:
    """Ids of the seeded request, then those of its neighbours."""
    before, after = BATCHES[batch]
    prompts = [[i + 1, 2, 3 * i] for i in range(len(before))] + [PROMPT]
    prompts += [[9, i, i + 4, 2] for i in range(len(after))]
    ids = [output.outputs[0].token_ids for output in llm.generate(prompts, [*before, SEEDED, *after])]
    return [ids.pop(len(before)), *ids]


@pytest.mark.parametrize("budget", [2048, 4])
def test_seeded_request_is_repeatable(budget: int, close_logits: dict[str, Any], drained: Drained) -> None:
    llm = drained(**close_logits, max_num_batched_tokens=budget)
    runs = {batch: [_run(llm, batch) for _ in range(4)] for batch in BATCHES}
    seeded = {batch: [run[0] for run in four] for batch, four in runs.items()}
    first = seeded["alone"][0]
    assert len(first) == 16
    assert seeded == {batch: [first] * 4 for batch in BATCHES}
    neighbours = [run[1] for run in runs["an unseeded neighbour"]]
    assert any(ids != neighbours[0] for ids in neighbours), "an unseeded request must not repeat itself"


def test_budget_and_engine_do_not_change_the_stream(close_logits: dict[str, Any], drained: Drained) -> None:
    engines = [
        drained(**close_logits, max_num_batched_tokens=budget, async_scheduling=is_async)
        for budget, is_async in ((2048, True), (4, True), (3, False))
    ]
    streams = [_run(llm, "mixed neighbours around")[0] for llm in engines]
    assert streams == [streams[0]] * len(engines)


@pytest.mark.parametrize("is_async", [False, True])
def test_preemption_keeps_a_seed_that_the_user_did_not_set(
    is_async: bool, close_logits: dict[str, Any], drained: Drained
) -> None:
    """`RunnerConfig.seed` makes the drawn seeds the same in both engines, so the ids must be, too."""
    options = {**close_logits, "block_size": 4, "seed": 5, "async_scheduling": is_async}
    roomy, tight, other = (
        drained(**options),
        drained(**options, num_blocks=14),
        drained(**options | {"seed": 6}),
    )
    prompts = [[i + 1] * 9 for i in range(4)]
    ids = [[o.outputs[0].token_ids for o in llm.generate(prompts, UNSEEDED)] for llm in (roomy, tight, other)]
    assert tight.stats().preemptions > 0
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]
    assert ids[0] != [o.outputs[0].token_ids for o in roomy.generate(prompts, UNSEEDED)]
