"""Tokens to words: spaces, characters of several tokens, punctuation, pauses; beside transformers' rules."""

from __future__ import annotations

from typing import Any

import pytest
from model_states_whisper.words import (
    SpokenWord,
    cut_after_pause,
    cut_at_sentences,
    join_punctuation,
    keep_within,
    split_words,
    usual_duration,
)
from support.tiny_words import make_tokenizer

TOKENIZER = make_tokenizer()
TEXTS = [
    " the cat sat.",
    " the cat, the \"dog\" (and 3.5 'mice')... no!",
    "no space at the start",
    " Zürich, naïve café — “quoted” ¿qué?",
    " 🙂 smiles 👩‍👩‍👧 here",
    " don't [stop] {now} -5 a-b",
    "  two  spaces ",
    " 東京 is big",
    " .",
    "",
]


class _AsWhisper:
    """What transformers' own rules ask of a tokenizer."""

    eos_token_id, language = 10**6, None

    def decode(self, ids: list[int], **_: Any) -> str:
        return str(TOKENIZER.decode(ids, clean_up_tokenization_spaces=False))


def _words(text: str, language: str | None = "en") -> list[SpokenWord]:
    """Words one second after another, with the number of tokens as their probabilities."""
    ids = TOKENIZER(text)["input_ids"]
    pieces = split_words(TOKENIZER, ids, language)
    assert sum(count for _, count in pieces) == len(ids)
    return [SpokenWord(piece, i, i + 1, (1.0,) * count) for i, (piece, count) in enumerate(pieces)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("language", "name"), [("en", "english"), ("ja", "japanese"), (None, "english")])
def test_words_equal_transformers(text: str, language: str | None, name: str) -> None:
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    ids = TOKENIZER(text)["input_ids"]
    words = join_punctuation(_words(text, language))
    expected, tokens, _ = _combine_tokens_into_words(_AsWhisper(), ids, name)
    assert [word.text for word in words] == expected
    assert [len(word.token_probabilities) for word in words] == [len(part) for part in tokens]
    assert "".join(word.text for word in words) == text


def test_replacement_character_that_is_meant() -> None:
    # transformers loses what comes after it.
    assert [word.text for word in _words(" \ufffd is itself")] == [" \ufffd", " is", " itself"]


def test_characters_are_never_cut() -> None:
    assert [word.text for word in _words("東京🙂", "ja")] == ["東", "京", "🙂"]
    ids = TOKENIZER("東京")["input_ids"][:-1]  # cut off by the end of the window
    assert [count for _, count in split_words(TOKENIZER, ids, "ja")] == [3, 2]


def test_punctuation_keeps_the_times_of_its_word() -> None:
    words = join_punctuation(_words(' "the cat".'))
    assert [(word.text, word.start, word.end) for word in words] == [(' "the', 1, 2), (' cat".', 2, 3)]


def _spoken(*times: tuple[str, float, float]) -> list[SpokenWord]:
    return [SpokenWord(text, start, end, (1.0,)) for text, start, end in times]


def test_pause_at_the_end_of_a_sentence_is_nobodys() -> None:
    words = _spoken(
        (" a", 0, 0.2), (".", 0.2, 3), (" b", 3, 3.2), ("!", 3.2, 3.3), (" c", 3.3, 6), (" d", 6, 6.2)
    )
    usual = usual_duration(words)
    assert usual == pytest.approx(0.2)
    cut_at_sentences(words, usual)
    assert [word.start for word in words] == pytest.approx([0, 0.2, 3, 3.2, 5.6, 6])
    assert [word.end for word in words] == pytest.approx([0.2, 0.6, 3.2, 3.3, 6, 6.2])


def test_pause_before_the_first_word_is_not_its() -> None:
    words = _spoken((" a", 0, 5), (" b", 5, 5.2), (" c", 5.2, 5.4))
    cut_after_pause(words, 0.0, 0.2)
    assert (words[0].start, words[0].end) == pytest.approx((4.6, 5))
    words = _spoken((" a", 0, 1), (" b", 1, 5), (" c", 5, 5.2))
    cut_after_pause(words, 0.0, 0.2)
    assert (words[0].start, words[0].end) == pytest.approx((4.2, 4.6))
    assert (words[1].start, words[1].end) == pytest.approx((4.6, 5))
    words = _spoken((" a", 4.9, 5), (" b", 5, 5.2))
    cut_after_pause(words, 4.8, 0.2)
    assert words[0].start == 4.9


def test_usual_word() -> None:
    assert usual_duration([]) == usual_duration(_spoken((" a", 1, 1))) == 0.0
    assert usual_duration(_spoken((" a", 0, 9))) == 0.7
    cut_after_pause([], 0.0, 0.0)


def test_times_stay_within_and_in_order() -> None:
    words = _spoken((" a", 0, 1.5), (" b", 1.4, 2.0), (" c", 1.9, 9), (" d", 9, 9.5))
    keep_within(words, 1.0, 4.0)
    assert [(word.start, word.end) for word in words] == [(1.0, 1.5), (1.5, 2.0), (2.0, 4.0), (4.0, 4.0)]
