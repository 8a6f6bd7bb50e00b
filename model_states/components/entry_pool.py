"""`EntryPool`: who holds which entry of a pool, by content. Host bookkeeping alone."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    index: int
    num_holders: int = 0
    is_filled: bool = False


class EntryPool:
    """Entries 1 to `num_entries`; entry 0 is the null entry, which nobody holds.

    What has the same key shares an entry. One that nobody holds any more keeps its content, once it is filled, until
    its room is wanted: the one that was let go of first gives way first. max_fills: most new entries of one step.
    """

    def __init__(self, num_entries: int, max_fills: int) -> None:
        self.num_entries, self.max_fills = num_entries, max_fills
        self._free = list(range(num_entries, 0, -1))
        self._entries: dict[bytes, _Entry] = {}
        self._idle: dict[bytes, None] = {}  # filled and held by nobody, in the order of release
        self._reserved: dict[bytes, None] = {}  # of the step being built; none of them is held
        self._num_fills = 0  # reservations that are not filled

    @property
    def num_held(self) -> int:
        """Entries that somebody holds."""
        return len(self._entries) - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Entries that keep their content though nobody holds them."""
        return len(self._idle)

    def reserve(self, key: bytes) -> str | None:
        """Set an entry aside until `drop_reservations`; else why there is none."""
        entry = self._entries.get(key)
        if key in self._reserved or (entry is not None and entry.num_holders):
            return None
        if len(self._reserved) >= len(self._free) + len(self._idle):
            return f"all {self.num_entries} are held"
        if entry is None:
            if self._num_fills >= self.max_fills:
                return f"{self.max_fills} are filled in this step already"
            self._num_fills += 1
        self._reserved[key] = None
        return None

    def drop_reservations(self) -> None:
        """Set nothing aside any more."""
        self._reserved.clear()
        self._num_fills = 0

    def take(self, key: bytes) -> tuple[int, bool]:
        """Hold the entry of `key` once more: its index, and whether it must be filled now.

        IndexError where every entry is held, which a reservation rules out.
        """
        entry = self._entries.get(key)
        is_new = entry is None
        if entry is None:
            entry = self._entries[key] = _Entry(self._free.pop() if self._free else self._evict())
        entry.num_holders += 1
        self._idle.pop(key, None)
        self._reserved.pop(key, None)
        return entry.index, is_new

    def take_ahead(self, key: bytes, wanted: Container[bytes]) -> int | None:
        """Hold an entry for a key that has none, if that displaces nothing that is set aside or wanted; else None."""
        if key in self._entries or (not self._free and self._evictable(wanted) is None):
            return None
        entry = self._entries[key] = _Entry(self._free.pop() if self._free else self._evict(wanted), 1)
        return entry.index

    def is_filled(self, key: bytes) -> bool:
        """Whether the entry of `key` has its content."""
        return self.find(key) is not None

    def find(self, key: bytes) -> int | None:
        """Index of the entry of `key`, if that has its content."""
        entry = self._entries.get(key)
        return entry.index if entry is not None and entry.is_filled else None

    def set_filled(self, key: bytes, index: int) -> None:
        """What is launched from now on may read the content of `key`, if that is still what the entry is for."""
        entry = self._entries.get(key)
        if entry is not None and entry.index == index:
            entry.is_filled = True

    def release(self, key: bytes) -> None:
        """Let go of an entry; its last holder leaves the content behind."""
        entry = self._entries[key]
        entry.num_holders -= 1
        if entry.num_holders:
            return
        if entry.is_filled:
            self._idle[key] = None
        else:
            del self._entries[key]
            self._free.append(entry.index)

    def is_held(self, key: bytes) -> bool:
        """Whether somebody holds the entry of `key`."""
        return key in self._entries and key not in self._idle

    def _evictable(self, wanted: Container[bytes]) -> bytes | None:
        # What is set aside for this step is wanted in a moment.
        return next((key for key in self._idle if key not in self._reserved and key not in wanted), None)

    def _evict(self, wanted: Container[bytes] = ()) -> int:
        key = self._evictable(wanted)
        if key is None:
            raise IndexError(f"all {self.num_entries} entries are held")
        del self._idle[key]
        return self._entries.pop(key).index
