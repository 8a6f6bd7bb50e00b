"""Steps with drafts, made by hand: nothing in the engine proposes any yet, and acceptance is forced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from model_states_mamba.state import MambaState

from model_states import InputBatch, ModelConfig, ModelState, bind
from model_states.components import RecurrentState
from model_states.loading import load_checkpoint_config

BLOCK_SIZE, NUM_DRAFTS, NUM_BLOCKS, NUM_SLOTS = 16, 5, 40, 4


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

    def __init__(self, directory: str, state_class: type[ModelState] = MambaState) -> None:
        self.config = ModelConfig(
            checkpoint=load_checkpoint_config(directory),
            device=torch.device("cpu"),
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
        num_rejected = torch.tensor([row.num_rejected or 0 for row in rows] + [0], dtype=torch.int32)
        self.hooks.postprocess_state(batch, batch.cu_num_logits.diff() - num_rejected, num_rejected)
        return self.state.compute_logits(hidden_states[: batch.num_tokens])

    def state_of(self, row: Row, num_computed: int) -> list[dict[str, torch.Tensor]]:
        """By layer, the state of a request that has computed so many tokens."""
        block = row.blocks[(num_computed - 1) // BLOCK_SIZE]
        return [
            {name: pool[block].clone() for name, pool in layer.tensors.items()}
            for layer in self.recurrent.layers
        ]

    def _batch(self, rows: tuple[Row, ...]) -> InputBatch:
        num_rows, lengths = len(rows) + 1, [len(row.tokens) for row in rows]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        logits = np.cumsum([0, *(1 if r.num_rejected is None else len(r.tokens) for r in rows)]).astype(
            np.int32
        )
        computed = [row.num_computed for row in rows]
        ids = [token for row in rows for token in row.tokens] + [9]
        positions = [c + i for c, n in zip(computed, lengths, strict=True) for i in range(n)] + [0]
        tables = torch.full((num_rows, 16), 7, dtype=torch.int32)
        for b, row in enumerate(rows):
            tables[b, : len(row.blocks)] = torch.tensor(row.blocks)
        of_row = np.repeat(np.arange(num_rows), [*lengths, 1])
        slots = [
            int(tables[b, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for b, p in zip(of_row, positions, strict=True)
        ]

        def int32(values: object) -> torch.Tensor:
            return torch.tensor(np.array(values), dtype=torch.int32)

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
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            block_tables=(tables,) * len(self.groups),
            slot_mappings=(torch.tensor([*slots[:-1], -1]),) * len(self.groups),
            logits_indices=torch.zeros(0, dtype=torch.int64),
            expanded_idx_mapping=int32([]),
            expanded_local_pos=int32([]),
            cu_num_logits=int32([*logits, logits[-1]]),
            cu_num_logits_np=logits,
            max_query_len=max(lengths),
            max_seq_len=max(c + n for c, n in zip(computed, lengths, strict=True)),
        )
