"""A request's state is kept when it ends, saved, and goes on in another engine as if it had never left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from driver import Driver
from support.drained import Drained
from support.phases import pushing_out
from support.reference import assert_wholly_exact

from core_runner import LLM, ModelRunner, RequestError, RunnerConfig, SamplingParams
from model_states.components import SavedState, StateKeeper

_draw = random.Random(6)
PROMPT = [_draw.randrange(3, 211) for _ in range(21)]
MORE = [_draw.randrange(3, 211) for _ in range(7)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
SIZES = {"device": "cpu", "block_size": 16, "max_num_reqs": 3, "max_model_len": 128, "num_blocks": 30}


def _llm(drained: Drained, model, **options) -> LLM:
    options = {"model_options": {"state_block_size": 16}, **SIZES, **options}
    return drained(model.directory, **options)


def _kept(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> SavedState:
    keeper = StateKeeper()
    given = {"prompt_token_ids": prompt, "model_inputs": {"keep_state": keeper}}
    (output,) = llm.generate([given], params)
    return keeper.take([*prompt, *output.outputs[0].token_ids])


@pytest.mark.parametrize("name", ["mamba2", "falcon_mamba"])
def test_a_conversation_goes_on_elsewhere(name: str, tiny, drained: Drained, tmp_path: Path) -> None:
    model = tiny(name)
    here, there = _llm(drained, model), _llm(drained, model, max_num_batched_tokens=4)
    for length in (1, 11, 16, 21):
        # The last token given out is never computed; states end before, at and behind the end of a block.
        state = _kept(here, PROMPT[:length])
        assert state.num_restored_tokens == length + 4
        state.save(tmp_path / "state.safetensors")
        prompt = SavedState.load(tmp_path / "state.safetensors").prompt(MORE)
        beside = PROMPT[: length + 3]
        got, other = there.generate([prompt, beside], GREEDY)
        assert got.num_cached_tokens == length + 4
        assert_wholly_exact(
            got.outputs[0], model.reference(prompt["prompt_token_ids"], 5), f"{length} tokens"
        )
        assert_wholly_exact(other.outputs[0], model.reference(beside, 5))


def test_restored_requests_may_be_preempted_and_kept_again(tiny, drained: Drained) -> None:
    model = tiny("mamba2")
    llm = _llm(drained, model)
    prompt = _kept(llm, PROMPT).prompt(MORE)
    keeper = StateKeeper()
    prompt["model_inputs"] = {**prompt["model_inputs"], "keep_state": keeper}
    ids = prompt["prompt_token_ids"]
    with pushing_out(llm.engine, len(ids) + 2) as pushed_out:
        (output,) = llm.generate([prompt], GREEDY)
    assert pushed_out
    assert_wholly_exact(output.outputs[0], model.reference(ids, 5))
    again = keeper.take([*ids, *output.outputs[0].token_ids]).prompt([9])
    (output,) = llm.generate([again], GREEDY)
    assert_wholly_exact(output.outputs[0], model.reference(again["prompt_token_ids"], 5))


def test_states_are_shared_with_nobody(tiny, drained: Drained) -> None:
    """Whoever brings a false state gets false tokens, and nobody else does."""
    model = tiny("mamba2")
    llm = _llm(drained, model)
    state = _kept(llm, [*PROMPT, *MORE, *PROMPT])
    false = SavedState(state.token_ids, {name: -tensor for name, tensor in state.tensors.items()})
    prompt = false.prompt(MORE)
    (output,) = llm.generate([prompt], GREEDY)
    want = model.reference(prompt["prompt_token_ids"], 5)
    assert output.outputs[0].token_ids != want.token_ids
    (output,) = llm.generate([prompt["prompt_token_ids"]], GREEDY)
    assert_wholly_exact(output.outputs[0], want)


@pytest.mark.parametrize("length", [11, 15, 16, 21])
def test_a_scheduler_of_ones_own_exports_a_state_and_brings_it_elsewhere(length: int, tiny) -> None:
    """It ends before, at and behind the end of a block; whose state it is goes on undisturbed."""
    model = tiny("mamba2")
    config = {name: value for name, value in SIZES.items() if name != "num_blocks"}
    here, there = (
        Driver(
            ModelRunner(
                RunnerConfig(
                    model=model.directory, num_blocks=30, model_options={"state_block_size": 16}, **config
                )
            )
        )
        for _ in range(2)
    )
    prompt, beside = PROMPT[:length], PROMPT[5:]
    here.step([1, 0], {0: beside, 1: prompt})
    here.step([1, 0])
    (component,) = here.runner.model_state.components
    exported = component.export_state(1, here.computed[1])
    kept = {name: tensor.clone() for name, tensor in exported.items()}
    known = [*prompt, *here.tokens[1]]
    assert here.computed[1] == len(known) - 1
    for _ in range(3):
        here.step([0, 1])
    assert all(torch.equal(exported[name], tensor) for name, tensor in kept.items()), "it is a copy"
    state = SavedState(known[:-1], exported)
    there.step(
        [2],
        {2: known},
        num_computed_tokens=state.num_restored_tokens,
        model_inputs={"recurrent_state": state},
    )
    for _ in range(2):
        there.step([2])
    wanted = model.reference(prompt, 5).token_ids
    assert here.tokens[1] == wanted
    assert there.tokens[2] == wanted[2:]
    assert here.tokens[0] == model.reference(beside, 5).token_ids


def test_an_engine_that_ran_ahead_says_so(tiny, drained: Drained) -> None:
    model = tiny("mamba2")
    tokens = model.reference(PROMPT, 5).token_ids
    params = SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=tokens[2:3])
    stopped = tokens.index(tokens[2]) + 1
    state = _kept(_llm(drained, model, async_scheduling=False), PROMPT, params)
    assert state.num_restored_tokens == len(PROMPT) + stopped - 1
    keeper = StateKeeper()
    with pytest.raises(ValueError, match="no state was kept"):
        keeper.take(PROMPT)
    keeper.keep(9, {})
    with pytest.raises(ValueError, match="9 tokens, 2 more"):
        keeper.take([1] * 7)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"keep_state": 3}, "must be a StateKeeper"),
        ({"recurrent_state": {}}, "must be a SavedState"),
        ({"recurrent_state": SavedState([5] * 21, {})}, "21 tokens of a prompt of 21"),
        ({"recurrent_state": SavedState([5] * 20, {})}, "another model's"),
        ({"recurrent_state": SavedState([5] * 20, {"a": [1.0]})}, "state a must be a dense tensor"),
        (
            {"recurrent_state": SavedState([5] * 20, {"a": torch.ones(1, device="meta")})},
            "dense tensor with data",
        ),
        (
            {"recurrent_state": SavedState([5] * 20, {"a": torch.ones(1).int()})},
            "a is of torch.int32; give floating",
        ),
    ],
)
def test_what_does_not_fit_is_refused(inputs: dict, message: str, tiny, drained: Drained) -> None:
    llm = _llm(drained, tiny("mamba2"))
    with pytest.raises(RequestError, match=message):
        llm.generate([{"prompt_token_ids": PROMPT, "model_inputs": inputs}], GREEDY)


def test_models_that_keep_more_refuse(tiny, drained: Drained, request) -> None:
    llm = _llm(drained, tiny("bamba"))
    with pytest.raises(RequestError, match="attention layers need keys and values"):
        llm.generate([{"prompt_token_ids": PROMPT, "model_inputs": {"keep_state": StateKeeper()}}], GREEDY)


def test_files_of_something_else_are_refused(tiny, tmp_path: Path) -> None:
    garbage = tmp_path / "state.safetensors"
    garbage.write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"state\.safetensors is no safetensors file"):
        SavedState.load(garbage)
    with pytest.raises(ValueError, match="holds no saved state"):
        SavedState.load(f"{tiny('mamba2').directory}/model.safetensors")
