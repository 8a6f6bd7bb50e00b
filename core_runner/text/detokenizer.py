"""Text of a stream of ids: the deltas joined are the text of all ids, and no delta holds half a character.

Token edges are not text edges. Bytes of one character may lie in several ids, and in some vocabularies a
leading space shows only after another id. So a small window of ids is decoded: `context`, whose text is out
already, and `pending`, whose text is not; the delta is what `pending` adds. The text of a run of raw-byte ids
is decided at its end (one bad byte spoils the run), so it waits for the id after it. Each id is decoded a few
times, whatever the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from core_runner.text.stop_strings import StopStrings
from core_runner.text.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A whole character has at most 4 bytes: so many ids without one are no character that is still to come.
_CROWDED = 16


class IncrementalDetokenizer:
    """One request's text. `tokenizer`: a `Tokenizer` or a transformers tokenizer, shared and never changed.

    stop: strings that end the text; it is cut before the one that completes first, and held back while its
    tail could still become one. stopped: the stop string that was met, or None.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
        self._skip = skip_special_tokens
        self._skipped = self._tokenizer.skipped_ids if skip_special_tokens else frozenset()
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._byte_run: list[int] = []
        self._stops = StopStrings(stop)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Every delta so far, joined."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, token_ids: Iterable[int]) -> str:
        """Take ids and return the text that became certain; "" after a stop string."""
        if self.stopped is not None:
            return ""
        before = len(self._pending)
        for token_id in token_ids:
            self._take(int(token_id))
        # Decoded once for all ids of a step: a step may accept several.
        added = len(self._pending) > before
        return self._emit(self._stops.push(self._settle()) if added else "")

    def finish(self) -> str:
        """What was held back, and a broken character if the ids end inside one. Push nothing after it."""
        if self.stopped is not None:
            return ""
        # No id will follow, so a run of bytes is what it is, and half a character is a broken one.
        self._pending += self._byte_run
        self._byte_run = []
        rest = self._decode(self._context + self._pending)[len(self._context_text) :]
        self._context, self._context_text, self._pending = [], "", []
        return self._emit(self._stops.push(rest) + self._stops.finish())

    def _take(self, token_id: int) -> None:
        piece = self._tokenizer.piece(token_id)
        if piece is None or token_id in self._skipped:
            return
        # Its place is behind the bytes that wait, whose run it ends unless it is one itself.
        self._byte_run.append(token_id)
        if not _BYTE_PIECE.match(piece):
            self._pending += self._byte_run
            self._byte_run = []

    def _settle(self) -> str:
        """Text that `pending` adds; "" while it ends inside a character or adds nothing visible yet."""
        whole = self._decode(self._context + self._pending)
        if whole.endswith(_BROKEN):
            return self._settle_crowded(whole)
        delta = whole[len(self._context_text) :]
        if delta:
            # Ids without text make no context: the space of the id after them would be taken for a leading one.
            self._slide(len(self._pending))
        return delta

    def _settle_crowded(self, whole: str) -> str:
        """Bytes that never become characters must not make the window grow: give the certain part away.

        A split is certain where both halves decode to the whole, since a character across it would not.
        """
        if len(self._pending) < _CROWDED:
            return ""
        for split in range(len(self._pending) - 1, 0, -1):
            head = self._decode(self._context + self._pending[:split])
            if head + self._decode(self._pending[split:]) == whole:
                delta = head[len(self._context_text) :]
                self._slide(split)
                return delta
        return ""

    def _slide(self, count: int) -> None:
        """The first `count` pending ids are out: they are the context of those that follow."""
        self._context = self._pending[:count]
        self._context_text = self._decode(self._context)
        self._pending = self._pending[count:]

    def _decode(self, token_ids: list[int]) -> str:
        if len(token_ids) == 1:
            return self._tokenizer.decode_one(token_ids[0], skip_special_tokens=self._skip)
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _emit(self, delta: str) -> str:
        if delta:
            self._parts.append(delta)
        return delta
