"""A request's state is kept when it ends, saved, and goes on in another engine as if it had never left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from driver import Driver
from support.drained import Drained
from support.moved_states import (
    GREEDY,
    MORE,
    SIZES,
    check_it_goes_on,
    check_it_may_be_pushed_out,
    kept,
    two_engines,
)
from support.moved_states import PROMPT as LONG
from support.reference import assert_wholly_exact

from core_runner import LLM, ModelRunner, RequestError, RunnerConfig, SamplingParams
from model_states import PluginManager
from model_states.components import SavedState, StateKeeper, StateTransfer

PROMPT = LONG[:21]
HYBRIDS = ("bamba", "jamba", "granitemoehybrid", "falcon_h1", "zamba2", "nemotron_h")


def _llm(drained: Drained, model, **options) -> LLM:
    options = {"model_options": {"state_block_size": 16}, "device": "cpu", **SIZES, **options}
    return drained(model.directory, **options)


@pytest.mark.parametrize("name", ["mamba2", "falcon_mamba", *HYBRIDS])
def test_a_conversation_goes_on_elsewhere(name: str, tiny, drained: Drained, tmp_path: Path) -> None:
    model = tiny(name)
    here, there = two_engines(drained, model)
    check_it_goes_on(model, here, there, tmp_path)
    check_it_may_be_pushed_out(model, here, there)


def test_a_conversation_goes_on_in_steps_that_are_waited_for(tiny, drained: Drained, tmp_path: Path) -> None:
    model = tiny("bamba")
    here, there = two_engines(drained, model, (32, 16), async_scheduling=False)
    check_it_goes_on(model, here, there, tmp_path)
    check_it_may_be_pushed_out(model, there, here)


@pytest.mark.parametrize("length", [28, 30])
def test_completions_of_one_prompt_go_on_from_one_state(length: int, tiny, drained: Drained) -> None:
    """Where the state ends with a block, a later completion hits the block that the first one loaded it into."""
    model = tiny("bamba")
    here, there = two_engines(drained, model, (16, 16))
    prompt = kept(here, LONG[:length]).prompt([*MORE, *LONG[:9]])
    params = replace(GREEDY, n=3)
    (output,) = there.generate([prompt], params)
    for completion in output.outputs:
        assert_wholly_exact(completion, model.reference(prompt["prompt_token_ids"], 5))
    (output,) = there.generate([prompt["prompt_token_ids"]], GREEDY)
    assert output.num_cached_tokens == 0


def test_what_was_read_in_one_engine_is_recalled_in_another(drained: Drained) -> None:
    """The embedded hybrid: the text goes to one engine, and the question about it to another."""
    sizes = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_reqs": 4}
    here = drained("embedded:mamba", **sizes, model_options={"state_block_size": 64})
    there = drained("embedded:mamba", **sizes, block_size=8, max_num_batched_tokens=256)
    answer = SamplingParams(temperature=0.0, max_tokens=16, stop="\n")
    examples = json.loads((Path(PluginManager().locate("embedded:mamba")) / "heldout.json").read_text())
    examples = [e for e in examples if e.get("distance") in (64, 256, 512) and not e["chat"]]
    prompts = []
    for example in examples:
        assert here.tokenizer is not None
        ids = here.tokenizer.encode_prompt(example["prompt"])
        num_asking = len(here.tokenizer.encode_prompt("recall " + example["prompt"].rsplit("recall ", 1)[1]))
        # Nothing has been computed of the one token that is given out, so that the text is all of the state.
        read = replace(answer, max_tokens=1)
        state = kept(here, ids[:-num_asking], read)
        assert list(state.token_ids) == ids[:-num_asking]
        prompts.append(state.prompt(ids[-num_asking:]))
    assert len(prompts) >= 3
    for example, output in zip(examples, there.generate(prompts, answer), strict=True):
        assert output.outputs[0].text.strip() == example["reference"]


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_states_are_shared_with_nobody(name: str, tiny, drained: Drained) -> None:
    """Whoever brings a false state gets false tokens, and nobody else does."""
    model = tiny(name)
    llm = _llm(drained, model)
    state = kept(llm, [*PROMPT, *MORE, *PROMPT])
    false = SavedState(state.token_ids, {name: -tensor for name, tensor in state.tensors.items()})
    prompt = false.prompt(MORE)
    (output,) = llm.generate([prompt], GREEDY)
    want = model.reference(prompt["prompt_token_ids"], 5)
    assert output.outputs[0].token_ids != want.token_ids
    (output,) = llm.generate([prompt["prompt_token_ids"]], GREEDY)
    assert_wholly_exact(output.outputs[0], want)


@pytest.mark.parametrize("length", [11, 15, 16, 21])
@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_a_scheduler_of_ones_own_exports_a_state_and_brings_it_elsewhere(
    name: str, length: int, tiny
) -> None:
    """It ends before, at and behind the end of a block; whose state it is goes on undisturbed."""
    model = tiny(name)
    config = {"device": "cpu", **{name: value for name, value in SIZES.items() if name != "num_blocks"}}
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
    transfer = here.runner.model_state.components[-1]
    assert isinstance(transfer, StateTransfer)
    exported = transfer.export_state(1, here.computed[1])
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
        model_inputs={"saved_state": state},
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
    state = kept(_llm(drained, model, async_scheduling=False), PROMPT, params)
    assert state.num_restored_tokens == len(PROMPT) + stopped - 1
    keeper = StateKeeper()
    with pytest.raises(ValueError, match="no state was kept"):
        keeper.take(PROMPT)
    keeper.keep("r", 9, [])
    with pytest.raises(ValueError, match="9 tokens, and 7 are given"):
        keeper.take([1] * 7)
    assert keeper.take([1] * 9).num_restored_tokens == 9


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"keep_state": 3}, "must be a StateKeeper"),
        ({"saved_state": {}}, "must be a SavedState"),
        ({"saved_state": SavedState([5] * 20, {})}, "of other tokens than the first 20 of the prompt"),
        ({"saved_state": SavedState(PROMPT, {})}, "21 tokens of a prompt of 21"),
        ({"saved_state": SavedState(PROMPT[:20], {})}, "another model's, or not whole: .* is missing"),
        ({"saved_state": SavedState(PROMPT[:20], {"a": [1.0]})}, "state a must be a dense tensor"),
        (
            {"saved_state": SavedState(PROMPT[:20], {"a": torch.ones(1, device="meta")})},
            "dense tensor with data",
        ),
        (
            {"saved_state": SavedState(PROMPT[:20], {"a": torch.ones(1)})},
            "another model's: this one keeps no a;",
        ),
    ],
)
def test_what_does_not_fit_is_refused(inputs: dict, message: str, tiny, drained: Drained) -> None:
    llm = _llm(drained, tiny("mamba2"))
    with pytest.raises(RequestError, match=message):
        llm.generate([{"prompt_token_ids": PROMPT, "model_inputs": inputs}], GREEDY)


def test_a_state_that_is_not_whole_or_of_others_is_refused(tiny, drained: Drained) -> None:
    """Nothing is changed: the engine serves on, and the state itself is taken."""
    model = tiny("bamba")
    llm = _llm(drained, model)
    state = kept(llm, PROMPT)
    tensors, ids = dict(state.tensors), state.token_ids
    key = "attention.0.key"
    false = {
        f"{key} is missing": (ids, {name: t for name, t in tensors.items() if name != key}),
        r"recurrent\.0\.ssm is missing": (ids, {n: t for n, t in tensors.items() if n != "recurrent.0.ssm"}),
        r"of other tokens: attention.* is \(25, 2, 8\), not \(24, 2, 8\)": (ids[:-1], tensors),
        f"{key} is .24, 2, 8., not .25, 2, 8.": (ids, {**tensors, key: tensors[key][1:]}),
        f"{key} is .25, 1, 8., not": (ids, {**tensors, key: tensors[key][:, 1:]}),
        f"{key} is of torch.bfloat16, and this engine keeps torch.float32; load the model with": (
            ids,
            {**tensors, key: tensors[key].bfloat16()},
        ),
        "this one keeps no attention.9.key": (ids, {**tensors, "attention.9.key": tensors[key]}),
    }
    for message, (token_ids, given) in false.items():
        with pytest.raises(RequestError, match=message):
            llm.generate([SavedState(token_ids, given).prompt(MORE)], GREEDY)
    with pytest.raises(RequestError, match="another model's"):
        _llm(drained, tiny("jamba")).generate([state.prompt(MORE)], GREEDY)
    (output,) = llm.generate([state.prompt(MORE)], GREEDY)
    assert_wholly_exact(output.outputs[0], model.reference([*ids, *MORE], 5))


def test_files_of_something_else_are_refused(tiny, tmp_path: Path) -> None:
    garbage = tmp_path / "state.safetensors"
    garbage.write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"state\.safetensors is no safetensors file"):
        SavedState.load(garbage)
    with pytest.raises(ValueError, match="holds no saved state"):
        SavedState.load(f"{tiny('mamba2').directory}/model.safetensors")
