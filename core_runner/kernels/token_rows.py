"""Which batch row a token belongs to, for the torch twins; Triton kernels run one program per row instead."""

from __future__ import annotations

import torch


def token_rows(start_loc: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, index within the row, and whether the token is real, for tokens 0 .. num_tokens - 1.

    start_loc is an exclusive prefix sum, int32 [num_rows + 1]. A padding token (at or past start_loc[-1])
    gets row num_rows - 1 and index 0, which can be looked up but mean nothing. All results are [num_tokens].
    """
    tokens = torch.arange(num_tokens, dtype=start_loc.dtype, device=start_loc.device)
    rows = torch.searchsorted(start_loc, tokens, right=True) - 1
    real = tokens < start_loc[-1]
    rows = rows.clamp_(max=start_loc.numel() - 2)
    return rows, torch.where(real, tokens - start_loc[rows], 0), real
