"""Runs of tokens with the places where they are heard, joined row by row without a loop."""

from typing import NamedTuple

import torch
from vocabulary import END_ID


class Pieces(NamedTuple):
    """Runs of tokens to join: tokens and whether they count [rows, n, width], spans [..., 2], lengths [rows, n]."""

    tokens: torch.Tensor
    spans: torch.Tensor
    counted: torch.Tensor
    lengths: torch.Tensor


def concatenate(
    tokens: torch.Tensor, spans: torch.Tensor, counted: torch.Tensor, lengths: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Join the first `lengths` tokens of each piece; [rows, size(, 2)], ends of text that count for nothing behind."""
    rows, _, width = tokens.shape
    ends = lengths.cumsum(1)
    places = torch.arange(size, device=tokens.device).expand(rows, -1).contiguous()
    piece = torch.searchsorted(ends, places, right=True)
    inside = piece < lengths.shape[1]
    piece = piece.clamp(max=lengths.shape[1] - 1)
    index = piece * width + (places - (ends - lengths).gather(1, piece)).clamp(max=width - 1)
    joined = torch.where(inside, tokens.flatten(1).gather(1, index), END_ID)
    index_2 = index[..., None].expand(-1, -1, 2)
    joined_spans = torch.where(inside[..., None], spans.flatten(1, 2).gather(1, index_2), 0)
    return joined, joined_spans, inside & counted.flatten(1).gather(1, index)
