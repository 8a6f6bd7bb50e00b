"""The states that a running engine holds, and what they must be by transformers' own account."""

from __future__ import annotations

from typing import Any

import torch

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
def check_states(llm: LLM, model: Any, slot: int, tokens: list[int]) -> None:
    """What the slot holds after these tokens is what one pass of transformers over all of them leaves, to 1e-4."""
    component = component_of(llm.engine.runner)
    row = state_rows(llm.engine.runner, slot)[(len(tokens) - 1) // component.block_size]
    cache = model(torch.tensor([tokens]), use_cache=True)
    cache = cache.get("cache") or cache["past_key_values"]
    layers = [layer for layer in cache.layers if getattr(layer, "conv_states", None)]
    assert len(layers) == len(component.layers)
    for layer, ours in zip(layers, component.layers, strict=True):
        conv = ours.tensors["conv"][row]
        _assert_near(conv, layer.conv_states[0][0].T[-len(conv) :], f"inputs after {len(tokens)} tokens")
        if "delta" in ours.tensors:
            want = layer.recurrent_states[0][0].mT
            _assert_near(ours.tensors["delta"][row], want, f"state after {len(tokens)} tokens")


def _assert_near(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    error = float((got - want).norm() / want.norm().clamp(min=1e-3))
    assert error < 1e-4, f"{label}: relative error {error:.2g}"


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
