"""Stop strings: found across token edges, cut out, and nothing of them let out early."""

import random

import pytest
from text_tokenizers import byte_fallback, byte_level, single_bytes

from core_runner.text import IncrementalDetokenizer, Tokenizer
from core_runner.text.stop_strings import StopStrings


def reference(text, stops):
    """The rule on the whole text: the first to end wins, of those the longest; the text before it."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_any_cutting_into_pieces_gives_the_reference():
    rng = random.Random(0)
    found = 0
    for _ in range(600):
        text = "".join(rng.choices("ab", k=rng.randint(0, 14)))
        stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3)))
        watch, out, at = StopStrings(stops), "", 0
        while at < len(text) and watch.found is None:
            step = rng.randint(1, 5)
            out += watch.push(text[at : at + step])
            at += step
        if watch.found is None:
            out += watch.finish()
        assert (out, watch.found) == reference(text, stops)
        found += watch.found is not None
    assert 100 < found < 500


def test_nothing_that_may_become_a_stop_string_goes_out_early():
    watch = StopStrings(("END",))
    assert [watch.push(c) for c in "xENyEN"] == ["x", "", "", "ENy", "", ""]
    assert watch.finish() == "EN"


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_a_stop_string_over_split_characters(build):
    tokenizer = Tokenizer(build())
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("好!",))
    ids = [
        *single_bytes(tokenizer.hf, "你好!"),
        *tokenizer.hf.encode(" the"),
        *single_bytes(tokenizer.hf, "x"),
    ]
    deltas = [detokenizer.push([i]) for i in ids]
    assert "".join(deltas) == detokenizer.text == "你"
    assert detokenizer.stopped == "好!"
    assert detokenizer.finish() == ""
    assert detokenizer.push(ids) == ""


def test_without_a_match_the_held_back_tail_comes_at_the_end():
    tokenizer = Tokenizer(byte_level())
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("mat!",))
    assert "".join(detokenizer.push([i]) for i in tokenizer.hf.encode("the mat")) == "the "
    assert detokenizer.finish() == "mat"
    assert detokenizer.stopped is None
    assert detokenizer.text == "the mat"


def test_ids_that_end_inside_a_character_may_still_complete_a_stop_string():
    tokenizer = Tokenizer(byte_fallback())
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("!",))
    assert detokenizer.push(single_bytes(tokenizer.hf, "a!b")) == ""
    assert detokenizer.finish() == "a"
    assert detokenizer.stopped == "!"
