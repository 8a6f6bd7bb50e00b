"""Words out of tokens: where one ends and the next begins, and how long one can plausibly last.

The rules are those of the reference implementation of Radford et al. 2022 (whisper/tokenizer.py, whisper/timing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

# Written without spaces between words: every character is taken for one.
UNSPACED_LANGUAGES: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_OPENING: Final = "\"'“¿¡([{-"
_CLOSING: Final = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_SENTENCE_ENDS: Final = ".。!！?？"  # noqa: RUF001
_PUNCTUATION: Final = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_UNFINISHED: Final = "\ufffd"  # what a tokenizer makes of part of a character
_LONGEST_MEDIAN: Final = 0.7  # seconds
_PAUSE: Final = 4  # median words


@dataclass(slots=True)
class SpokenWord:
    """text: with its space. start, end: seconds. token_probabilities: of each of its tokens."""

    text: str
    start: float
    end: float
    token_probabilities: tuple[float, ...]

    def take(self, first: SpokenWord, second: SpokenWord) -> None:
        """Be the text of both, of which this is one."""
        self.text = first.text + second.text
        self.token_probabilities = first.token_probabilities + second.token_probabilities


def split_words(tokenizer: Any, token_ids: Sequence[int], language: str | None) -> list[tuple[str, int]]:
    """(text, number of tokens) of each word, punctuation apart; together they are the text of all tokens.

    tokenizer: transformers'. A word begins at a space or a punctuation mark, in languages that do not put spaces
    between words at every character. A character is never cut.
    """
    characters = _split_characters(tokenizer, token_ids)
    if language in UNSPACED_LANGUAGES:
        return characters
    words: list[tuple[str, int]] = []
    for text, count in characters:
        if not words or text.startswith(" ") or text.strip() in _PUNCTUATION:
            words.append((text, count))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + count)
    return words


def _split_characters(tokenizer: Any, token_ids: Sequence[int]) -> list[tuple[str, int]]:
    """As few tokens at a time as make whole characters."""
    whole = _decode(tokenizer, token_ids)
    pieces: list[tuple[str, int]] = []
    first = length = 0
    for end in range(1, len(token_ids) + 1):
        text = _decode(tokenizer, token_ids[first:end])
        # Where both sides of a cut character are decoded by themselves, they do not make up the whole.
        if _UNFINISHED not in text or text + _decode(tokenizer, token_ids[end:]) == whole[length:]:
            pieces.append((text, end - first))
            first, length = end, length + len(text)
    return pieces


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


def usual_duration(words: Iterable[SpokenWord]) -> float:
    """Seconds of a word: the median, at most 0.7; 0 without any that takes time."""
    durations = [word.end - word.start for word in words if word.end > word.start]
    return min(median(durations), _LONGEST_MEDIAN) if durations else 0.0


def cut_at_sentences(words: Sequence[SpokenWord], usual: float) -> None:
    """Beside the end of a sentence a word lasts at most twice the usual: cut what is more, in place.

    A path through the audio has no place for silence, so a word beside a pause is given all of it. To be called while
    punctuation is apart.
    """
    longest = 2 * usual
    for before, word in pairwise(words):
        if word.end - word.start <= longest:
            continue
        if word.text.strip() in _SENTENCE_ENDS:
            word.end = word.start + longest
        elif before.text.strip() in _SENTENCE_ENDS:
            word.start = word.end - longest


def cut_after_pause(words: Sequence[SpokenWord], spoken_until: float, usual: float) -> None:
    """The first two words after a pause of four usual words last at most twice the usual each: cut them, in place.

    spoken_until: seconds, of what was said before.
    """
    if not words or words[0].end - spoken_until <= _PAUSE * usual:
        return
    longest, first, second = 2 * usual, words[0], words[1] if len(words) > 1 else None
    if second is not None and second.end - second.start > longest:
        first.end = second.start = max((first.start + second.end) / 2, second.end - longest)
    if first.end - first.start > longest:
        first.start = first.end - longest


def join_punctuation(words: Sequence[SpokenWord]) -> list[SpokenWord]:
    """Opening marks become part of the word after them, closing marks of the one before; neither changes its times."""
    opened: list[SpokenWord] = []
    for word in reversed(words):
        if opened and word.text.startswith(" ") and word.text.strip() in _OPENING:
            opened[-1].take(word, opened[-1])
        else:
            opened.append(word)
    closed: list[SpokenWord] = []
    for word in reversed(opened):
        if closed and not closed[-1].text.endswith(" ") and word.text in _CLOSING:
            closed[-1].take(closed[-1], word)
        else:
            closed.append(word)
    return closed


def keep_within(words: Sequence[SpokenWord], start: float, end: float) -> None:
    """Bring times into [start, end] in place, none before the one before it."""
    for word in words:
        word.start = min(max(word.start, start), end)
        word.end = start = min(max(word.end, word.start), end)
