"""The device buffers of a step."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from model_states.staged import StagedTensor
from model_states.staged_writer import StagedWriter


class InputBuffers:
    """Device buffers of a step at their largest size; addresses never change, so a graph can replay them.

    `packed` int32 [3 R + 2] is what the host writes: idx_mapping [R], query_start_loc [R + 1], cu_num_logits
    [R + 1], each at a fixed place and named by a view of it. `staged` is the same for a writer.
    """

    def __init__(
        self,
        max_num_tokens: int,
        max_num_reqs: int,
        max_num_logits: int,
        max_blocks: tuple[int, ...],
        device: torch.device,
        writer: StagedWriter,
    ) -> None:
        int32 = partial(torch.zeros, dtype=torch.int32, device=device)
        int64 = partial(torch.zeros, dtype=torch.int64, device=device)
        self.staged = StagedTensor((1, 3 * max_num_reqs + 2), torch.int32, device, writer=writer)
        self.packed = self.staged.tensor[0]
        sizes = [max_num_reqs, max_num_reqs + 1, max_num_reqs + 1]
        self.idx_mapping, self.query_start_loc, self.cu_num_logits = torch.split(self.packed, sizes)
        self.seq_lens = int32(max_num_reqs)
        self.input_ids = int64(max_num_tokens)
        self.positions = int64(max_num_tokens)
        self.block_tables = tuple(int32(max_num_reqs, columns) for columns in max_blocks)
        self.slot_mappings = tuple(int64(max_num_tokens) for _ in max_blocks)
        self.expanded_idx_mapping = int32(max_num_logits)
        self.expanded_local_pos = int32(max_num_logits)
        self.logits_indices = int64(max_num_logits)
        # Steps come in few sizes, and a dozen views take the host longer than a replay.
        self.views = lru_cache(maxsize=256)(self._views)

    def _views(self, num_tokens: int, num_rows: int, num_logits: int) -> dict[str, Any]:
        """The device fields of an `InputBatch` of these padded sizes."""
        return {
            "idx_mapping": self.idx_mapping[:num_rows],
            "query_start_loc": self.query_start_loc[: num_rows + 1],
            "seq_lens": self.seq_lens[:num_rows],
            "input_ids": self.input_ids[:num_tokens],
            "positions": self.positions[:num_tokens],
            "block_tables": tuple(table[:num_rows] for table in self.block_tables),
            "slot_mappings": tuple(mapping[:num_tokens] for mapping in self.slot_mappings),
            "logits_indices": self.logits_indices[:num_logits],
            "expanded_idx_mapping": self.expanded_idx_mapping[:num_logits],
            "expanded_local_pos": self.expanded_local_pos[:num_logits],
            "cu_num_logits": self.cu_num_logits[: num_rows + 1],
        }
