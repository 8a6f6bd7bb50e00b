"""Steps with drafts, made by hand: nothing in the engine proposes any yet, and acceptance is forced."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mamba.states import States, assert_states_equal
from model_states_mamba.state import MambaState

from model_states import InputBatch, ModelConfig, ModelState, bind
from model_states.components import RecurrentState
from model_states.loading import load_checkpoint_config

BLOCK_SIZE, NUM_DRAFTS, NUM_BLOCKS, NUM_SLOTS = 16, 5, 40, 4
_draw = random.Random(4)
TOKENS = [_draw.randrange(3, 211) for _ in range(80)]
WRONG = [_draw.randrange(3, 211) for _ in range(NUM_DRAFTS)]
OTHER = [_draw.randrange(3, 211) for _ in range(80)]


@dataclass
class Row:
    """Tokens of a request in one step. blocks: of every group alike; num_rejected: of its drafts, None without any."""

    slot: int
    blocks: list[int]
    tokens: list[int]
    num_computed: int
    num_rejected: int | None = None


class ForcedSteps:
    """One model with room for drafts, stepped row by row."""

    def __init__(
        self, directory: str, state_class: type[ModelState] = MambaState, device: str = "cpu"
    ) -> None:
        self.config = ModelConfig(
            checkpoint=load_checkpoint_config(directory),
            device=torch.device(device),
            dtype=torch.float32,
            max_model_len=256,
            max_num_reqs=NUM_SLOTS,
            max_num_batched_tokens=128,
            block_size=BLOCK_SIZE,
            num_draft_tokens=NUM_DRAFTS,
            options={"state_block_size": BLOCK_SIZE},
        )
        self.state = state_class(self.config)
        self.hooks = bind([self.state, *self.state.components])
        self.groups = self.hooks.cache_groups()
        self.caches = {group.name: group.allocate(NUM_BLOCKS, self.config.device) for group in self.groups}
        self.hooks.init_caches(self.caches)
        self.recurrent = next(c for c in self.state.components if isinstance(c, RecurrentState))

    @torch.inference_mode()
    def step(self, *rows: Row) -> torch.Tensor:
        """Logits of every token, [num_tokens, vocab_size]; one padding row and one padding token follow."""
        batch = self._batch(rows)
        self.hooks.preprocess_state(batch)
        self.hooks.prepare_attn(batch)
        hidden_states = self.state.forward(batch, **self.hooks.prepare_inputs(batch))
        num_rejected = self._int32([row.num_rejected or 0 for row in rows] + [0])
        self.hooks.postprocess_state(batch, batch.cu_num_logits.diff() - num_rejected, num_rejected)
        return self.state.compute_logits(hidden_states[: batch.num_tokens])

    def state_of(self, row: Row, num_computed: int) -> States:
        """By layer, the state of a request that has computed so many tokens."""
        block = row.blocks[(num_computed - 1) // BLOCK_SIZE]
        return [
            {name: pool[block].clone() for name, pool in layer.tensors.items()}
            for layer in self.recurrent.layers
        ]

    def _int32(self, values: object) -> torch.Tensor:
        return torch.tensor(np.array(values), dtype=torch.int32, device=self.config.device)

    def _batch(self, rows: tuple[Row, ...]) -> InputBatch:
        num_rows, lengths = len(rows) + 1, [len(row.tokens) for row in rows]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        logits = np.cumsum([0, *(1 if r.num_rejected is None else len(r.tokens) for r in rows)]).astype(
            np.int32
        )
        computed = [row.num_computed for row in rows]
        ids = [token for row in rows for token in row.tokens] + [9]
        positions = [c + i for c, n in zip(computed, lengths, strict=True) for i in range(n)] + [0]
        tables = np.full((num_rows, 16), 7, np.int32)
        for b, row in enumerate(rows):
            tables[b, : len(row.blocks)] = row.blocks
        of_row = np.repeat(np.arange(num_rows), [*lengths, 1])
        slots = [
            int(tables[b, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for b, p in zip(of_row, positions, strict=True)
        ]
        int32, device = self._int32, self.config.device
        return InputBatch(
            num_reqs=len(rows),
            num_tokens=int(starts[-1]),
            idx_mapping=int32([row.slot for row in rows] + [NUM_SLOTS]),
            idx_mapping_np=np.array([row.slot for row in rows], np.int32),
            num_scheduled_tokens_np=np.array(lengths, np.int32),
            num_computed_tokens_np=np.array(computed, np.int32),
            query_start_loc=int32([*starts, starts[-1]]),
            query_start_loc_np=starts,
            seq_lens=int32([c + n for c, n in zip(computed, lengths, strict=True)] + [0]),
            input_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            block_tables=(int32(tables),) * len(self.groups),
            slot_mappings=(torch.tensor([*slots[:-1], -1], device=device),) * len(self.groups),
            logits_indices=torch.zeros(0, dtype=torch.int64, device=device),
            expanded_idx_mapping=int32([]),
            expanded_local_pos=int32([]),
            cu_num_logits=int32([*logits, logits[-1]]),
            cu_num_logits_np=logits,
            max_query_len=max(lengths),
            max_seq_len=max(c + n for c, n in zip(computed, lengths, strict=True)),
        )


@torch.no_grad()
def recomputed_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of every token, as transformers computes them from the beginning."""
    logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    return logits.log_softmax(-1)


def assert_logits(got: torch.Tensor, model: Any, tokens: list[int]) -> None:
    """`got`: logits of the last of these tokens, within 1e-4 of log-probability."""
    want = recomputed_logprobs(model, tokens)[-len(got) :]
    torch.testing.assert_close(got.log_softmax(-1), want, rtol=0, atol=1e-4)


def check_rejected_drafts(
    steps: ForcedSteps,
    model: Any,
    recomputed: Callable[[Any, list[int]], States],
    num_accepted: int,
    offsets: Iterable[int],
) -> None:
    """Drafts that begin at these offsets, before, at and behind the end of a block; so many are accepted.

    recomputed: of the model and tokens, the state after them. The request beside never has drafts.
    """
    row = Row(1, [3, 9, 4], [], 0)
    beside = Row(2, [20, 21, 22, 23, 24], OTHER[:40], 0)

    def check(request: Row, tokens: list[int]) -> None:
        """The state after these tokens, and what is kept for prefix hits of the block that they have filled."""
        for count in {len(tokens), *range(BLOCK_SIZE, len(tokens), BLOCK_SIZE)}:
            label = f"{num_accepted} accepted, {len(tokens)} tokens, state after {count}"
            assert_states_equal(steps.state_of(request, count), recomputed(model, tokens[:count]), label)

    for offset in offsets:
        row.tokens, row.num_computed, row.num_rejected = TOKENS[:offset], 0, None
        steps.step(row, beside)
        drafts = [*TOKENS[offset + 1 :][:num_accepted], *WRONG][:NUM_DRAFTS]
        row.tokens, row.num_computed = [TOKENS[offset], *drafts], offset
        row.num_rejected = NUM_DRAFTS - num_accepted
        steps.step(Row(2, beside.blocks, [OTHER[40]], 40), row)
        count = offset + 1 + num_accepted
        check(row, TOKENS[:count])
        check(beside, OTHER[:41])
        # Two more steps, the first with drafts again: what was rejected is overwritten.
        row.tokens, row.num_computed = [*TOKENS[count : count + 2], *WRONG[2:]], count
        row.num_rejected = len(WRONG[2:])
        steps.step(row)
        check(row, TOKENS[: count + 2])
        row.tokens, row.num_computed, row.num_rejected = [TOKENS[count + 2]], count + 2, None
        assert_logits(steps.step(row), model, TOKENS[: count + 3])
