"""Word error rates."""

import re
from collections.abc import Iterable


def word_errors(reference: list[str], hypothesis: list[str]) -> int:
    """Fewest words to insert, delete or replace."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, said in enumerate(hypothesis, 1):
            diagonal, row[j] = row[j], min(diagonal + (word != said), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def normalized(text: str) -> list[str]:
    """Words in lower case without the punctuation around them."""
    return [word for word in (re.sub(r"^\W+|\W+$", "", word.lower()) for word in text.split()) if word]


def error_rates(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Of (reference, hypothesis) pairs: errors a word as written, and without case and punctuation; exact texts."""
    errors = plain_errors = words = plain_words = exact = count = 0
    for reference, hypothesis in pairs:
        errors += word_errors(reference.split(), hypothesis.split())
        plain_errors += word_errors(normalized(reference), normalized(hypothesis))
        words, plain_words = words + len(reference.split()), plain_words + len(normalized(reference))
        exact += reference.split() == hypothesis.split()
        count += 1
    return {
        "texts": count,
        "words": words,
        "wer": round(errors / max(1, words), 5),
        "wer_normalized": round(plain_errors / max(1, plain_words), 5),
        "exact": round(exact / max(1, count), 4),
    }
