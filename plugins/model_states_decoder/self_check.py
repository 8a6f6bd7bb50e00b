"""A numerical check, at load, of architectures that this project has no test for."""

from __future__ import annotations

import numpy as np
import torch

from model_states import InputBatch, ModelConfig, UnsupportedModelError
from model_states.components import PagedAttention
from model_states.transformers_bridge import ATTN_IMPLEMENTATION, TransformersModel

_NUM_TOKENS = 24
# Relative error of hidden states; rounding in bfloat16 stays an order of magnitude below, a lost or misplaced
# token an order above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


def check_paged_equals_eager(
    model: TransformersModel, attention: PagedAttention, config: ModelConfig
) -> None:
    """Run a short sequence in two chunks through the paged path and at once through transformers' own.

    Raises `UnsupportedModelError` naming the architecture when they differ: it keeps state that the paged
    path does not know of.
    """
    ids = torch.arange(_NUM_TOKENS, device=config.device) * 7919 % model.vocab_size
    length = min(_NUM_TOKENS, config.max_model_len)
    groups = attention.cache_groups()
    blocks = length // config.block_size + 2
    attention.init_caches({g.name: g.allocate(blocks, config.device) for g in groups})
    cut = length // 2 + 1
    paged = []
    for start, end in ((0, cut), (cut, length)):
        batch = _one_row_batch(ids[start:end], start, len(groups), config)
        attention.prepare_attn(batch)
        paged.append(model.forward(batch.input_ids, batch.positions))
    model.model.set_attn_implementation("eager")
    expected = model.forward(ids[:length], torch.arange(length, device=config.device))
    model.model.set_attn_implementation(ATTN_IMPLEMENTATION)
    error = (torch.cat(paged).float() - expected.float()).norm() / expected.float().norm()
    if not error < _TOLERANCE[config.dtype]:
        raise UnsupportedModelError(
            f"{model.architecture} gives other hidden states through paged attention than through transformers "
            f"(relative error {float(error):.2g}): it keeps state that the decoder plugin does not know of"
        )


def _one_row_batch(ids: torch.Tensor, start: int, num_groups: int, config: ModelConfig) -> InputBatch:
    """A batch of one request in slot 0 whose blocks are 1, 2, 3, ..."""
    device, count = config.device, len(ids)

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = torch.arange(start, start + count, device=device)
    table = torch.arange(1, (start + count) // config.block_size + 2, dtype=torch.int32, device=device)[None]
    return InputBatch(
        num_reqs=1,
        num_tokens=count,
        idx_mapping=int32(0),
        idx_mapping_np=np.zeros(1, np.int32),
        num_scheduled_tokens_np=np.array([count], np.int32),
        num_computed_tokens_np=np.array([start], np.int32),
        query_start_loc=int32(0, count),
        query_start_loc_np=np.array([0, count], np.int32),
        seq_lens=int32(start + count),
        input_ids=ids,
        positions=positions,
        block_tables=(table,) * num_groups,
        slot_mappings=(positions + config.block_size,) * num_groups,
        logits_indices=torch.empty(0, dtype=torch.int64, device=device),
        expanded_idx_mapping=int32(),
        expanded_local_pos=int32(),
        cu_num_logits=int32(0, 0),
        cu_num_logits_np=np.zeros(2, np.int32),
        max_query_len=count,
        max_seq_len=start + count,
    )
