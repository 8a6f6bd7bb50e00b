"""A scheduler by hand over one `ModelRunner`: the test says which slots run in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core_runner import BlockUpdate, ModelRunner, NewRequest, SamplingParams, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Driver:
    """Every slot has blocks of its own in every group, from the last slot's on, so that row 1 is the last slot's."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.prompts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}

    def step(self, slots: Sequence[int], new: dict[int, list[int]] | None = None, **fields: Any) -> None:
        """Run these slots: a new one's whole prompt, or one token. fields: of the admissions."""
        new = new or {}
        for slot, prompt in new.items():
            self.prompts[slot], self.tokens[slot] = prompt, []
            self.computed[slot] = fields.get("num_computed_tokens", 0)
        counts = [max(len(self.prompts[slot]) - self.computed[slot], 1) for slot in slots]
        self.runner.execute_model(
            SchedulerOutput(
                removed=[],
                new_requests=[
                    NewRequest(f"r{slot}", slot, prompt, len(prompt), GREEDY, seed=slot, **fields)
                    for slot, prompt in new.items()
                ],
                block_updates=[
                    self._blocks(group, list(new)) for group in range(len(self.runner.cache_groups))
                ],
                slots=np.array(slots, np.int32),
                num_scheduled_tokens=np.array(counts, np.int32),
                num_computed_tokens=np.array([self.computed[slot] for slot in slots], np.int32),
            )
        )
        output = self.runner.sample_tokens()
        assert output is not None
        for row, slot in enumerate(slots):
            self.computed[slot] += counts[row]
            self.tokens[slot].append(int(output.get_output().sampled_token_ids[row, 0]))

    def _blocks(self, group: int, slots: list[int]) -> BlockUpdate:
        count = self.runner.block_tables.max_blocks[group]
        last = self.runner.config.max_num_reqs - 1
        ids = [(last - slot) * count + 1 + i for slot in slots for i in range(count)]
        sizes = (slots, [0] * len(slots), [count] * len(slots), ids)
        return BlockUpdate(*(np.array(values, np.int32) for values in sizes))
