"""A row that goes wrong ends its own request, loudly, and no other: NaN, stale reads, freed slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.drained import Drained
from support.reference import assert_exact
from support.toy_model import ToyPlugin, ToyTable, save_toy

from core_runner import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(temperature=0.7, seed=3, top_k=4, max_tokens=10, ignore_eos=True)
NEIGHBOURS = [[5, 6, 7], [4] * 9, [9, 8]]


def _check_neighbours(outputs: list[Any], table: ToyTable) -> None:
    for prompt, output in zip(NEIGHBOURS, outputs, strict=True):
        assert assert_exact(output.outputs[0], table.reference(prompt, 10), f"prompt {prompt}") == 0
        assert output.error is None


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("row", ["nan", "nothing allowed"])
def test_nan_ends_its_request_alone(
    row: str, params: SamplingParams, is_async: bool, tmp_path: Any, drained: Drained
) -> None:
    table, bad = ToyTable(50, seed=2), torch.nan if row == "nan" else -torch.inf

    def logits(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # The fourth token after a prompt of 20 is the one that fails; nobody else gets that far.
        return torch.where(positions[:, None] == 22, bad, table(keys, positions))

    llm = drained(
        save_toy(tmp_path, 50), plugins=[ToyPlugin(logits)], device="cpu", async_scheduling=is_async
    )
    prompt = list(range(1, 21))
    bad_one, *others = llm.generate([prompt, *NEIGHBOURS], [params, *[GREEDY] * 3])
    (completion,) = bad_one.outputs
    assert completion.finish_reason == "error"
    assert "NaN" in bad_one.error
    assert len(completion.token_ids) == 3, "only tokens from before the failure"
    if params is GREEDY:
        assert completion.token_ids == table.greedy(prompt, 3)
        assert len(completion.logprobs) == 3
    _check_neighbours(others, table)
    # Nothing of it is left in the prefix cache.
    again, *_ = llm.generate([prompt, *NEIGHBOURS], GREEDY)
    assert again.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("budget", [64, 5])
def test_stale_block_is_loud(
    budget: int, toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    """A component that reads one cell past its request's own: nobody wrote it, so it is poison."""
    llm = drained(**toy_options, max_num_batched_tokens=budget)
    # Every block has held somebody's tokens before.
    llm.generate([[i] * 30 for i in range(1, 9)], GREEDY)
    stale = {"prompt_token_ids": [5, 6, 7, 8, 9], "model_inputs": {"stale": True}}
    bad_one, *others = llm.generate([stale, *NEIGHBOURS], GREEDY)
    assert bad_one.outputs[0].finish_reason == "error"
    assert bad_one.outputs[0].token_ids == []
    _check_neighbours(others, toy_table)


def test_freed_slots_are_poison(toy_options: dict[str, Any], drained: Drained) -> None:
    llm = drained(**toy_options, max_num_reqs=3)
    llm.generate([[4, 5], [6], [7, 8, 9]], GREEDY)
    llm.close()
    states = llm.engine.runner.request_states
    assert states.num_free_slots == 3
    for field in (states.all_token_ids, states.num_computed_tokens, states.total_len, states.prefill_len):
        assert (field[:3] == -1).all()
        assert (field[3] == 0).all(), "the null slot stays zero"
    assert all((table[:3] == 0).all() for table in llm.engine.runner.block_tables.tensors)


def test_stop_strings_need_no_tokenizer_until_asked(toy_options: dict[str, Any], drained: Drained) -> None:
    """The toy has no tokenizer: ids work, and text is refused with the reason."""
    llm: LLM = drained(**toy_options)
    assert llm.generate([1, 2], GREEDY)[0].outputs[0].text == ""
    for bad in ("text", {"prompt": "text"}):
        with pytest.raises(ValueError, match=r"tokenizer|prompt_token_ids"):
            llm.generate(bad, GREEDY)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate([1, 2], SamplingParams(stop="x"))
