"""The embedded hybrid: what its card says it answers, and recall across chunks, blocks, prefix hits and preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mamba.recall import DISTANT, EXAMPLES, FOLDER, MODEL, SIZES, answers, as_prompt, check_answers
from mamba.states import pools
from support.drained import Drained, drained_llms
from support.phases import at_phases, pushing_out
from support.reference import assert_exact
from support.tiny_recurrent import recomputed_reference

from core_runner import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with drained_llms() as make:
        yield make(MODEL, **{**SIZES, "max_num_reqs": 16})


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_it_says_what_its_card_says(llm: LLM) -> None:
    said = [output.outputs[0].text.strip() for output in answers(llm, EXAMPLES)]
    different = [(e["prompt"][-60:], s) for e, s in zip(EXAMPLES, said, strict=True) if s != e["reference"]]
    # A tie may break the other way on another machine's sums.
    assert len(different) <= 1, f"{different}"
    assert sum(e["reference"] == e["answer"] for e in EXAMPLES) >= 0.85 * len(EXAMPLES)


def test_it_recalls_over_every_distance() -> None:
    """A weak checkpoint would make the tests below say little."""
    assert {row["distance"] for row in DISTANT} == {64, 128, 256, 512, 1024, 1500}
    assert sum(row["reference"] == row["answer"] for row in DISTANT) >= len(DISTANT) - 1


@pytest.mark.parametrize("distance", [64, 512])
def test_logprobs_are_transformers_own(llm: LLM, theirs: Any, distance: int) -> None:
    """Against full recomputation, which has no cached path to be wrong in."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
    for example in (row for row in DISTANT if row["distance"] == distance):
        (output,) = llm.generate(as_prompt(llm, example), params)
        want = recomputed_reference(theirs, output.prompt_token_ids, 3)
        assert assert_exact(output.outputs[0], want, f"{distance} tokens") == 0


@pytest.mark.parametrize(("budget", "block_size", "state_block_size"), [(100, 16, 64), (37, 8, 32)])
def test_recall_crosses_chunk_and_block_borders(
    budget: int, block_size: int, state_block_size: int, drained: Drained
) -> None:
    """Chunks end inside blocks and blocks inside chunks; both requests of a distance share the steps."""
    llm = drained(
        MODEL,
        **SIZES,
        max_num_batched_tokens=budget,
        block_size=block_size,
        model_options={"state_block_size": state_block_size},
    )
    check_answers(
        llm, [row for row in DISTANT if row["distance"] in (512, 1024, 1500)][: 6 if budget > 64 else 2]
    )


def _values(example: dict[str, Any]) -> dict[str, str]:
    """The named values of a distant example, by the lines that say them."""
    lines = (line.split(": ") for line in example["prompt"].split("\n"))
    return {parts[0]: parts[1] for parts in lines if len(parts) == 2 and " " not in parts[0] + parts[1]}


def test_a_second_question_hits_the_first_ones_prefix(drained: Drained) -> None:
    """The saved state and the shared blocks answer as the text itself does."""
    example = next(
        row for row in DISTANT if not row["chat"] and row["distance"] >= 512 and len(_values(row)) > 1
    )
    text, name = example["prompt"].removesuffix(" ->").rsplit("recall ", 1)
    other = [key for key in _values(example) if key != name][-1]
    question = {"chat": False, "prompt": f"{text}recall {other} ->", "answer": "one hundred"}
    cold = answers(drained(MODEL, **SIZES), [question])[0]
    llm = drained(MODEL, **SIZES, model_options={"state_block_size": 128})
    first, second, again = (answers(llm, [e])[0] for e in (example, question, example))
    assert first.num_cached_tokens == 0
    for output in (second, again):
        length = len(output.prompt_token_ids)
        assert length - 128 - 16 < output.num_cached_tokens < length
        assert output.num_cached_tokens % 128 == 0
    assert first.outputs[0].text.strip() == again.outputs[0].text.strip() == example["reference"]
    assert second.outputs[0].text == cold.outputs[0].text


def test_preempted_requests_recall_what_they_read(drained: Drained) -> None:
    llm = drained(MODEL, **SIZES, max_num_batched_tokens=256, model_options={"state_block_size": 64})
    examples = [row for row in DISTANT if row["distance"] in (256, 512)]
    with pushing_out(llm.engine, 6) as pushed_out:
        check_answers(llm, examples)
    assert len(pushed_out) >= 2


def test_without_its_state_it_does_not_recall(drained: Drained) -> None:
    """The recurrent layers do carry something from chunk to chunk: zeroed after each, answers are lost."""
    examples = [row for row in DISTANT if row["reference"] == row["answer"]][:8]
    llm = drained(
        MODEL, **SIZES, max_num_batched_tokens=64, enable_prefix_caching=False, async_scheduling=False
    )

    def forget(phase: str) -> None:
        if phase == "after update":
            for pool in pools(llm.engine.runner):
                pool.zero_()

    with at_phases(llm.engine, forget):
        outputs = answers(llm, examples)
    said = [output.outputs[0].text.strip() for output in outputs]
    assert sum(s == row["answer"] for s, row in zip(said, examples, strict=True)) <= len(examples) // 2
