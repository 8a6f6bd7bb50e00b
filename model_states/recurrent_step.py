"""`RecurrentStep`: where the layers of a step find their state and where they leave it; what every scan takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

# Scans work in chunks that end at multiples of this many tokens, so that states that are kept end chunks.
CHUNK_SIZE: Final = 64


class Chunk(NamedTuple):
    """Tokens [start, stop) of a batch, and the pool rows that take the state after them."""

    start: int
    stop: int
    targets: list[int]


@dataclass(slots=True)
class RecurrentStep:
    """One step, by batch row, in views of persistent buffers: a graph may hold them. Padding rows have no tokens.

    source_rows, final_rows, scratch_rows: pool rows before a row's first token, after its last one, and from which on
    after each of the others while it holds drafts; 0 is none; int32 [num_rows]. token_rows: batch row of each token,
    -1 for padding, int32 [num_tokens]. is_decode: no row has more than one token, and token b is row b's.
    """

    query_start_loc: torch.Tensor  # int32 [num_rows + 1]
    seq_lens: torch.Tensor  # computed and scheduled tokens, int32 [num_rows], 0 for padding
    block_table: torch.Tensor  # int32 [num_rows, max_blocks]
    block_size: int
    source_rows: torch.Tensor
    final_rows: torch.Tensor
    scratch_rows: torch.Tensor
    token_rows: torch.Tensor
    is_decode: bool

    def chunks(self, size: int) -> Iterator[tuple[int, list[Chunk]]]:
        """Source row and chunks of every row that has tokens, for the torch twins; it waits for the device.

        A chunk ends where a sequence's position is a multiple of `size` (a divisor or a multiple of `block_size`),
        where a block does, and with the row; a row with drafts goes token by token.
        """
        starts, block_size = self.query_start_loc.tolist(), self.block_size
        rows = (self.seq_lens, self.source_rows, self.final_rows, self.scratch_rows, self.block_table)
        for row, (end, source, final, scratch, table) in enumerate(
            zip(*(tensor.tolist() for tensor in rows), strict=True)
        ):
            start, stop = starts[row], starts[row + 1]
            unit = 1 if scratch else min(size, block_size)
            chunks = []
            token = start
            while token < stop:
                position = end - (stop - token)
                last = min((position // unit + 1) * unit, end)
                after = token + last - position
                targets = [final] if last == end else []
                if scratch and last < end:
                    targets.append(scratch + after - start - 1)
                if last < end and last % block_size == 0:
                    targets.append(table[last // block_size - 1])
                chunks.append(Chunk(token, after, targets))
                token = after
            if chunks:
                yield source, chunks
