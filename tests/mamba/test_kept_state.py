"""When a request's state is there to be taken, when there is none, and who may not see it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from driver import GREEDY as ONE_TOKEN
from driver import Driver
from mamba.states import pools
from support.drained import Drained
from support.moved_states import GREEDY, MORE, PROMPT, SIZES, kept
from support.reference import assert_wholly_exact
from support.replays import replayed_steps

from core_runner import LLM, BlockUpdate, ModelRunner, NewRequest, RunnerConfig, SchedulerOutput
from model_states import Component, hookimpl
from model_states.components import SavedState, StateKeeper

IDS = PROMPT[:20]


@pytest.fixture
def model(tiny):
    return tiny("bamba")


def _options(**options):
    return {"model_options": {"state_block_size": 16}, "device": "cpu", **SIZES, **options}


def _keeping(keeper: StateKeeper) -> dict:
    return {"prompt_token_ids": IDS, "model_inputs": {"keep_state": keeper}}


def _check_it_goes_on(llm: LLM, model, keeper: StateKeeper, tokens: list[int]) -> None:
    state = keeper.take(tokens)
    prompt = state.prompt([*tokens[state.num_restored_tokens :], *MORE])
    (output,) = llm.generate([prompt], GREEDY)
    assert output.num_cached_tokens == state.num_restored_tokens
    assert_wholly_exact(output.outputs[0], model.reference(prompt["prompt_token_ids"], 5))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_it_is_there_with_the_last_delta(async_scheduling: bool, model, drained: Drained) -> None:
    llm = drained(model.directory, **_options(async_scheduling=async_scheduling))
    keeper, tokens = StateKeeper(), list(IDS)
    beside = llm.stream([PROMPT[:9]], replace(GREEDY, max_tokens=40))
    next(beside)
    for delta in llm.stream([_keeping(keeper)], GREEDY):
        tokens += delta.token_ids
        if delta.finish_reason is not None:
            assert len(tokens) == len(IDS) + 5
            _check_it_goes_on(llm, model, keeper, tokens)
    assert sum(len(delta.token_ids) for delta in beside) > 5


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_request_that_gives_way_before_its_last_token_is_known_leaves_it(
    max_tokens: int, model, drained: Drained
) -> None:
    llm = drained(model.directory, **_options())
    scheduler, keeper, given_way = llm.engine.scheduler, StateKeeper(), []
    schedule = scheduler.schedule

    def push_out():
        table = scheduler._slots
        for slot in table.running().tolist():
            request = table.requests_np[slot]
            if not given_way and table.num_tokens_np[slot] >= request.max_total_len > request.num_tokens:
                given_way.append(request)
                scheduler._preempt(request)
        return schedule()

    with patch.object(scheduler, "schedule", push_out):
        (output,) = llm.generate([_keeping(keeper)], replace(GREEDY, max_tokens=max_tokens))
    assert given_way
    _check_it_goes_on(llm, model, keeper, [*IDS, *output.outputs[0].token_ids])


def test_an_interrupted_step_leaves_none(model, drained: Drained) -> None:
    """Its tokens are counted before the forward, which has not run."""
    llm = drained(model.directory, **_options())
    state, calls, keeper = llm.engine.runner.model_state, [], StateKeeper()
    forward = state.forward

    def fail(batch, **inputs):
        calls.append(batch.num_tokens)
        if len(calls) == 3:
            raise RuntimeError("the step broke off")
        return forward(batch, **inputs)

    with patch.object(state, "forward", fail), pytest.raises(RuntimeError, match="broke off"):
        llm.generate([_keeping(keeper)], GREEDY)
    with pytest.raises(ValueError, match="no state was kept"):
        keeper.take([*IDS, *range(9)])


def test_states_of_several_requests_are_not_told_apart(model, drained: Drained) -> None:
    llm = drained(model.directory, **_options())
    keeper = StateKeeper()
    (output,) = llm.generate([_keeping(keeper)], replace(GREEDY, n=3, temperature=2.0, seed=1))
    with pytest.raises(ValueError, match="3 requests left their state here"):
        keeper.take([*IDS, *output.outputs[0].token_ids])
    for _ in range(2):
        (output,) = llm.generate([_keeping(keeper)], GREEDY)
        _check_it_goes_on(llm, model, keeper, [*IDS, *output.outputs[0].token_ids])


def test_a_state_that_is_not_finite_is_none(model, drained: Drained) -> None:
    llm = drained(model.directory, **_options(async_scheduling=False))
    state, keeper = kept(llm, IDS), StateKeeper()
    broken = SavedState(state.token_ids, {name: t * float("nan") for name, t in state.tensors.items()})
    prompt = broken.prompt(MORE)
    prompt["model_inputs"] = {**prompt["model_inputs"], "keep_state": keeper}
    (output,) = llm.generate([prompt], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    with pytest.raises(ValueError, match="not finite"):
        keeper.take([*prompt["prompt_token_ids"], *MORE])


class Tag(Component):
    """Names a model input by its content, as a component of a model with images would."""

    input_names = frozenset({"tag"})

    @hookimpl
    def input_keys(self, request):
        """The tag itself."""
        return {"tag": request.model_inputs["tag"]} if "tag" in request.model_inputs else {}


def test_blocks_of_a_state_are_nobodys_prefix_though_another_input_has_a_name(
    model, drained: Drained
) -> None:
    llm = drained(model.directory, **_options(), extensions=[Tag()])
    state = kept(llm, PROMPT[:44])
    false = SavedState(state.token_ids, {name: -tensor for name, tensor in state.tensors.items()})
    prompt = false.prompt(MORE)
    prompt["model_inputs"]["tag"] = b"x"
    llm.generate([prompt], GREEDY)
    ids = prompt["prompt_token_ids"]
    (output,) = llm.generate([{"prompt_token_ids": ids, "model_inputs": {"tag": b"x"}}], GREEDY)
    assert output.num_cached_tokens == 0
    assert_wholly_exact(output.outputs[0], model.reference(ids, 5))


def test_a_state_waits_for_its_blocks(model, drained: Drained) -> None:
    """A scheduler of one's own may admit a request before it has any."""
    state = kept(drained(model.directory, **_options()), IDS)
    runner = ModelRunner(RunnerConfig(model=model.directory, **_options(num_blocks=30)))
    driver, none = Driver(runner), np.zeros(0, np.int32)
    driver.step([0], {0: PROMPT[:9]})
    ids, done = [*state.token_ids, *MORE], state.num_restored_tokens
    new = NewRequest(
        "r2",
        2,
        ids,
        len(ids),
        ONE_TOKEN,
        seed=1,
        num_computed_tokens=done,
        model_inputs={"saved_state": state},
    )
    nothing = [BlockUpdate(none, none, none, none)] * len(runner.cache_groups)
    runner.execute_model(SchedulerOutput([], [new], nothing, *(np.array([n], np.int32) for n in (0, 1, 9))))
    runner.sample_tokens()
    blocks = [driver._blocks(group, [2]) for group in range(len(runner.cache_groups))]
    runner.execute_model(
        SchedulerOutput([], [], blocks, *(np.array([n], np.int32) for n in (2, len(MORE), done)))
    )
    assert runner.sample_tokens().get_output().sampled_token_ids.tolist() == [
        [model.reference(ids, 1).token_ids[0]]
    ]
    assert not any(pool[0].any() for pool in pools(runner))


class Turning:
    """A plugin's sampler whose launches depend on how far the step's rows have come."""

    graph_variants = ("worst", "best")

    def __init__(self, inner) -> None:
        self.inner = inner

    def graph_variant(self, batch):
        """By the longest row."""
        ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens_np
        return "worst" if ends.max() < 24 else "best"

    def sample(self, logits, batch):
        """The given sampler on logits that are turned at first."""
        variant = batch.sampling_variant
        is_worst = (variant or self.graph_variant(batch)) == "worst"
        batch.sampling_variant = "plain"
        try:
            return self.inner.sample(-logits if is_worst else logits, batch)
        finally:
            batch.sampling_variant = variant


class WithTurning(Component):
    """Brings it."""

    records_step = True

    @hookimpl
    def custom_sampler(self, sampler):
        """Around the core's."""
        return Turning(sampler)


def test_repeated_steps_ask_a_plugins_sampler_what_it_launches(model, drained: Drained) -> None:
    found = []
    for steps in (contextlib.nullcontext(), replayed_steps()):
        with steps:
            llm = drained(model.directory, **_options(), extensions=[WithTurning()])
            outputs = [llm.generate([IDS], replace(GREEDY, logprobs=None, max_tokens=9)) for _ in range(3)]
        found.append([output[0].outputs[0].token_ids for output in outputs])
    assert llm.stats().step_ways["step graph"] > 5
    assert found[0] == found[1]
