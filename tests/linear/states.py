"""The states that a running engine holds, and what they must be by transformers' own account."""

from __future__ import annotations

from typing import Any

import torch
from mamba.states import States, assert_states_equal, held_state

from core_runner import LLM, ModelRunner, SchedulerOutput
from model_states.components import RecurrentState


def component_of(runner: ModelRunner) -> RecurrentState:
    [component] = [c for c in runner.model_state.components if isinstance(c, RecurrentState)]
    return component


def pools(runner: ModelRunner) -> list[torch.Tensor]:
    return [pool for layer in component_of(runner).layers for pool in layer.tensors.values()]


def state_rows(runner: ModelRunner, slot: int) -> list[int]:
    """Pool rows of a slot, by the block of tokens whose state they hold."""
    group = [group.name for group in runner.cache_groups].index(component_of(runner).group.name)
    return runner.block_tables.tensors[group][slot].tolist()


@torch.no_grad()
def recomputed_state(model: Any, tokens: list[int]) -> States:
    """By layer with state, what transformers' cache holds after one pass over all tokens."""
    outputs = model(torch.tensor([tokens], device=model.device), use_cache=True)
    cache = outputs.get("cache") or outputs["past_key_values"]
    states = []
    for layer in cache.layers:
        if getattr(layer, "conv_states", None):
            states.append({"conv": layer.conv_states[0][0].T})
            if getattr(layer, "recurrent_states", None) and layer.recurrent_states[0] is not None:
                states[-1]["delta"] = layer.recurrent_states[0][0].mT
    return states


def check_states(llm: LLM, model: Any, slot: int, tokens: list[int]) -> None:
    """What the slot holds after these tokens is what one pass of transformers over all of them leaves."""
    got = held_state(llm.engine.runner, slot, len(tokens))
    assert_states_equal(got, recomputed_state(model, tokens), f"{len(tokens)} tokens")


def running(llm: LLM) -> list[tuple[int, list[int]]]:
    """(slot, tokens computed so far) of every running request, of an engine that is not a step ahead."""
    table = llm.engine.scheduler._slots
    slots = table.running().tolist()
    return [(s, table.requests_np[s].token_ids(0, int(table.num_computed_np[s])).tolist()) for s in slots]


def watch_rows(runner: ModelRunner) -> None:
    """From now on, a step that changes a state row which none of its requests holds is an error."""
    execute = runner.execute_model

    def watching(step: SchedulerOutput) -> None:
        before = [pool.clone() for pool in pools(runner)]
        execute(step)
        own = {row for slot in step.slots.tolist() for row in state_rows(runner, slot)} - {0}
        others = torch.tensor([row for row in range(len(before[0])) if row not in own])
        for old, new in zip(before, pools(runner), strict=True):
            assert torch.equal(old[others], new[others]), "a step changed the state of a request not in it"

    runner.execute_model = watching  # type: ignore[method-assign]
