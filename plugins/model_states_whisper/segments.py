"""From the tokens of a window to segments: timestamps come in pairs, and say how far the window was decoded.

As in the published algorithm: text between two timestamps is a segment. Two timestamps in a row are the end of one and
the begin of the next. A window that ends in two has more to say, so the next one begins at the last of them; one that
ends in a single timestamp has said everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens of a segment, timestamps included; begin and end in positions of the window (0.02 s)."""

    start: int
    end: int
    token_ids: Sequence[int]


class WindowPieces(NamedTuple):
    """What a window says. is_open: there is more behind the last timestamp, which is the last piece's end."""

    pieces: Sequence[Piece]
    is_open: bool


def split_window(token_ids: Sequence[int], first_timestamp_id: int, num_positions: int) -> WindowPieces:
    """Pieces of the tokens of a window, without the end token. num_positions: of the window that hold audio."""
    is_time = [token >= first_timestamp_id for token in token_ids]
    cuts = [place for place, both in enumerate(pairwise(is_time), 1) if all(both)]
    if not cuts:
        return WindowPieces([_lone_piece(token_ids, first_timestamp_id, num_positions)], False)
    is_open = is_time[-2:] != [False, True]
    if not is_open:
        cuts.append(len(token_ids))
    pieces = []
    for start, end in pairwise([0, *cuts]):
        times = (token_ids[start], token_ids[end - 1])
        first, last = (token - first_timestamp_id for token in times)
        # The second timestamp of an open end shows, in the text before the next window, that it was one.
        is_last_open = is_open and end == cuts[-1]
        pieces.append(Piece(first, last, token_ids[start : end + is_last_open]))
    return WindowPieces(pieces, is_open)


def _lone_piece(token_ids: Sequence[int], first_timestamp_id: int, num_positions: int) -> Piece:
    """All tokens, of which one or two may be timestamps: where the text begins, and where it ends."""
    start, end = 0, num_positions
    if token_ids and token_ids[0] >= first_timestamp_id:
        start = token_ids[0] - first_timestamp_id
    later = [token - first_timestamp_id for token in token_ids[1:] if token >= first_timestamp_id]
    return Piece(start, later[-1] if later else end, token_ids)
