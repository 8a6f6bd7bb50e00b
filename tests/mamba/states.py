"""The states that a running engine holds, and what they must be by transformers' own account."""

from __future__ import annotations

from typing import Any

import torch

from core_runner import LLM, ModelRunner, SchedulerOutput
from model_states.components import RecurrentState

# By layer with state, its tensors by name.
States = list[dict[str, torch.Tensor]]


def component_of(runner: ModelRunner) -> RecurrentState:
    """The component with the recurrent state."""
    found = [c for c in runner.model_state.components if isinstance(c, RecurrentState)]
    return found[0]


def group_index(runner: ModelRunner) -> int:
    """Of the states' cache group."""
    return [group.name for group in runner.cache_groups].index(component_of(runner).group.name)


def pools(runner: ModelRunner) -> list[torch.Tensor]:
    """Every pool of every layer."""
    return [pool for layer in component_of(runner).layers for pool in layer.tensors.values()]


def held_state(runner: ModelRunner, slot: int, num_computed: int) -> States:
    """By layer, the state of a slot that has computed so many tokens."""
    component = component_of(runner)
    table = runner.block_tables.tensors[group_index(runner)]
    row = int(table[slot, (num_computed - 1) // component.block_size])
    assert row > 0
    return [{name: pool[row].clone() for name, pool in layer.tensors.items()} for layer in component.layers]


@torch.no_grad()
def recomputed_state(model: Any, tokens: list[int]) -> States:
    """By layer with state, what transformers' cache holds after one pass over all tokens."""
    outputs = model(torch.tensor([tokens], device=model.device), use_cache=True)
    # Releases of transformers call it differently.
    caches = (outputs.get(name) for name in ("cache", "cache_params", "past_key_values"))
    states = []
    for layer in next(cache for cache in caches if cache is not None).layers:
        # Some releases give layers without a state one that stays empty.
        if hasattr(layer, "recurrent_states") and layer.conv_states[0] is not None:
            states.append({"conv": layer.conv_states[0][0].T, "ssm": layer.recurrent_states[0][0]})
    return states


def assert_states_equal(got: States, want: States, label: str) -> None:
    """Within 1e-4 of the size of each state."""
    assert len(got) == len(want), label
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for name, state in ours.items():
            expected = theirs[name]
            if name == "conv":
                # transformers may keep one input more, the oldest first.
                expected = expected[-len(state) :]
            error = float((state - expected).norm() / expected.norm().clamp(min=1e-3))
            assert error < 1e-4, f"{label}, layer {index}, {name}: relative error {error:.2g}"


def running_rows(llm: LLM) -> list[tuple[int, list[int]]]:
    """(slot, tokens computed so far) of every running request, of an engine that is not a step ahead."""
    table = llm.engine.scheduler._slots
    rows = []
    for slot in table.running().tolist():
        request = table.requests_np[slot]
        rows.append((slot, request.token_ids(0, int(table.num_computed_np[slot])).tolist()))
    return rows


def watch_rows(runner: ModelRunner) -> None:
    """From now on, a step that changes a state row which none of its requests holds is an error."""
    execute = runner.execute_model

    def watching(step: SchedulerOutput) -> None:
        before = [pool.clone() for pool in pools(runner)]
        execute(step)
        table = runner.block_tables.tensors[group_index(runner)]
        own = {row for slot in step.slots.tolist() for row in table[slot].tolist()} - {0}
        others = torch.tensor([row for row in range(len(before[0])) if row not in own])
        for old, new in zip(before, pools(runner), strict=True):
            assert torch.equal(old[others], new[others]), "a step changed the state of a request not in it"

    runner.execute_model = watching  # type: ignore[method-assign]
