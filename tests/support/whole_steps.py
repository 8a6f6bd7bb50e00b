"""EXACT out of whole-step graphs: log-probabilities would keep the sampler out of them, so none are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from support.reference import Reference, assert_exact

from core_runner import LLM, SamplingParams
from model_states import InputBatch


def ways_since(llm: LLM, before: dict[str, int]) -> Counter[str]:
    """How many steps went which way since `before`, an earlier `llm.stats().step_ways`."""
    return Counter(llm.stats().step_ways) - Counter(before)


def mixed_replays(llm: LLM, scope: str = "step") -> int:
    """Steps with a prefill in them that graphs of that scope have served."""
    graphs = llm.engine.runner.graphs.graphs
    return sum(g.num_replays for g in graphs if g.scope == scope and g.shape.max_query_len > 1)


def check_whole_steps(llm: LLM, prompts: Sequence[Any], references: Sequence[Reference], label: str) -> None:
    """Serve the prompts three times, so that steps with prefills are replays too, and compare every token.

    references: of equal lengths. From here on the engine's padding holds garbage (field report C-02).
    """
    fill_with_garbage(llm.engine.runner)
    num_tokens = len(references[0].token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    before, mixed, skipped = llm.stats().step_ways, mixed_replays(llm), 0
    for _ in range(3):
        for output, reference in zip(llm.generate(prompts, params), references, strict=True):
            skipped += assert_exact(
                output.outputs[0], reference, f"{label}, {len(output.prompt_token_ids)} tokens"
            )
    assert skipped <= num_tokens, f"{label}: {skipped} positions had too small a margin to compare"
    ways = ways_since(llm, before)
    # Shapes that have not come before run eagerly, and steps of unfinished prompts alone have nothing to sample.
    assert ways["step graph"] > 3 * sum(ways.values()) // 4, f"{label}: {ways}"
    assert mixed_replays(llm) > mixed, f"{label}: no step with a prefill was replayed"


def fill_with_garbage(runner: Any) -> None:
    """Before each of the runner's steps, everything that kernels prepare holds what no step may see.

    The values are in range, so that a read of them shows as another token or another state and not as a fault of the
    device: they name a slot, a block and cells that belong to somebody, where there are as many.
    """
    buffers, begin = runner.inputs.buffers, runner.inputs.begin
    slot = min(1, runner.config.max_num_reqs - 1)
    garbage: list[tuple[torch.Tensor, int]] = [
        (buffers.input_ids, min(7, runner.model_state.vocab_size - 1)),
        (buffers.positions, 3),
        (buffers.seq_lens, min(40, runner.max_model_len)),
        (buffers.logits_indices, min(1, runner.config.max_num_batched_tokens - 1)),
        (buffers.expanded_idx_mapping, slot),
        (buffers.expanded_local_pos, 0),
    ]
    of_groups = (runner.cache_groups, runner.num_blocks, buffers.block_tables, buffers.slot_mappings)
    for group, num_blocks, table, mapping in zip(*of_groups, strict=True):
        garbage += [(table, min(1, num_blocks - 1)), (mapping, min(17, num_blocks * group.block_size - 1))]

    def begin_on_garbage(*args: Any) -> InputBatch:
        for tensor, value in garbage:
            tensor.fill_(value)
        return begin(*args)

    runner.inputs.begin = begin_on_garbage
