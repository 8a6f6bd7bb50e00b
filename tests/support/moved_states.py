"""A request's state leaves one engine and goes on in another, whatever its components keep."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

from support.drained import Drained
from support.phases import pushing_out
from support.recurrent_exact import TinyRecurrent
from support.reference import assert_exact

from core_runner import LLM, SamplingParams
from model_states.components import SavedState, StateKeeper

_draw = random.Random(6)
PROMPT = [_draw.randrange(3, 211) for _ in range(70)]
MORE = [_draw.randrange(3, 211) for _ in range(7)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
SIZES = {"block_size": 16, "max_num_reqs": 3, "max_model_len": 128, "num_blocks": 60}


def kept(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> SavedState:
    """The state that a request leaves."""
    keeper = StateKeeper()
    given = {"prompt_token_ids": prompt, "model_inputs": {"keep_state": keeper}}
    (output,) = llm.generate([given], params)
    return keeper.take([*prompt, *output.outputs[0].token_ids])


def two_engines(
    drained: Drained, model: TinyRecurrent, state_block_sizes: tuple[int, int] = (16, 32), **options: Any
) -> tuple[LLM, LLM]:
    """One that a conversation begins in, and one with other blocks, which computes few tokens in a step."""
    options = {"device": "cpu", **options}
    here, there = ({"model_options": {"state_block_size": size}} for size in state_block_sizes)
    return (
        drained(model.directory, **{**SIZES, **here, **options}),
        drained(
            model.directory, **{**SIZES, **there, "block_size": 4, "max_num_batched_tokens": 4, **options}
        ),
    )


def check_it_goes_on(
    model: TinyRecurrent, here: LLM, there: LLM, directory: Path, lengths: tuple[int, ...] = (1, 11, 17, 66)
) -> None:
    """States that end before, at and behind ends of blocks, by file and by pickle, beside a request without."""
    skipped = 0
    for length in lengths:
        # The last token given out is never computed.
        state = kept(here, PROMPT[:length])
        assert state.num_restored_tokens == length + 4
        state.save(directory / "state.safetensors")
        loaded = SavedState.load(directory / "state.safetensors")
        for given in (loaded, pickle.loads(pickle.dumps(state))):
            prompt = given.prompt(MORE)
            beside = PROMPT[: length + 3]
            got, other = there.generate([prompt, beside], GREEDY)
            assert got.num_cached_tokens == length + 4
            label = f"{model.name}, {length} tokens"
            skipped += assert_exact(got.outputs[0], model.reference(prompt["prompt_token_ids"], 5), label)
            skipped += assert_exact(other.outputs[0], model.reference(beside, 5), label)
    assert skipped <= 5


def check_it_may_be_pushed_out(model: TinyRecurrent, here: LLM, there: LLM) -> None:
    """Preempted behind its state, it is restored again; what it leaves is a state like any other."""
    skipped = 0
    for num_known in (0, 2):  # tokens given out: none, while what is behind the state is not yet computed
        prompt = kept(here, PROMPT[:21]).prompt(MORE)
        keeper = StateKeeper()
        prompt["model_inputs"] = {**prompt["model_inputs"], "keep_state": keeper}
        ids = prompt["prompt_token_ids"]
        with pushing_out(there.engine, len(ids) + num_known) as pushed_out:
            (output,) = there.generate([prompt], GREEDY)
        assert pushed_out
        assert output.num_cached_tokens == 25
        skipped += assert_exact(output.outputs[0], model.reference(ids, 5), model.name)
        again = keeper.take([*ids, *output.outputs[0].token_ids]).prompt([9])
        (output,) = here.generate([again], GREEDY)
        skipped += assert_exact(output.outputs[0], model.reference(again["prompt_token_ids"], 5), model.name)
    assert skipped <= 2
