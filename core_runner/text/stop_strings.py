"""Stop strings across token edges: which one completes first, and how much text may go out before."""

from __future__ import annotations


class StopStrings:
    """Watches one text. `found`: the stop string that completed first (the longest of several), or None.

    What is found does not depend on the pieces in which the text arrives.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.found: str | None = None
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> str:
        """Take text and return what may go out: all but a tail that could still become a stop string."""
        if not self._stop or not text:
            return text
        text = self._held + text
        # Every stop string is looked for: the first to end wins, and of those that end together the longest.
        ends = [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]
        if ends:
            _, start, self.found = min(ends)
            self._held = ""
            return text[:start]
        # The longest tail of any of them stays: what is out cannot be taken back.
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The held-back tail: nothing can complete it any more."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that begins `stop` without completing it."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if stop.startswith(text[-n:])), 0)
