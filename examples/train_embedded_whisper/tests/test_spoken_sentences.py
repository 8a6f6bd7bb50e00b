"""What is written and what is said of a sentence, the split, the vocabulary, word errors; and espeak where it is."""

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1]
sys.path.insert(0, str(FOLDER))

from clips import chunks, clips, make_clip  # noqa: E402
from listening import RATE, SAMPLES, Speaker, with_noisy_silences  # noqa: E402
from scoring import error_rates, word_errors  # noqa: E402
from sentences import Sentence, cardinal, is_heldout, make_strange, ordinal, parse, sentences, year  # noqa: E402
from vocabulary import END_ID, VOCAB_SIZE, build_tokenizer, train_bpe  # noqa: E402
from voices import HELDOUT_VARIANTS, TICK, VARIANTS, Spoken, word_spans  # noqa: E402

needs_espeak = pytest.mark.skipif(
    importlib.util.find_spec("espeakng_loader") is None, reason="espeakng-loader is not installed"
)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(count=2000)


def test_numbers_are_said_in_words():
    assert cardinal(345) == "three hundred and forty five"
    assert cardinal(7013) == "seven thousand and thirteen"
    assert [ordinal(n) for n in (2, 20, 23, 30, 31)] == [
        "second",
        "twentieth",
        "twenty third",
        "thirtieth",
        "thirty first",
    ]
    assert [year(n) for n in (1905, 1900, 2000, 2007, 2024)] == [
        "nineteen oh five",
        "nineteen hundred",
        "two thousand",
        "two thousand and seven",
        "twenty twenty four",
    ]


def test_punctuation_stands_on_both_sides():
    sentence = parse("Call Ben at 7:45|seven_forty_five, please.")
    assert sentence.text == "Call Ben at 7:45, please."
    assert sentence.said == ("Call", "Ben", "at", "seven forty five,", "please.")


def test_splits_share_no_sentence_and_voices():
    for heldout in (False, True):
        assert all(is_heldout(s.text) == heldout for s in itertools.islice(sentences(1, heldout), 200))
    assert not set(VARIANTS) & set(HELDOUT_VARIANTS)


def test_a_strange_word_takes_the_place_of_one():
    rng = random.Random(0)
    for _ in range(50):
        strange = parse(make_strange(rng, "Call Ben at 7:45|seven_forty_five, please."))
        pairs = list(zip(strange.written, "Call Ben at 7:45, please.".split(), strict=True))
        assert sum(new != old for new, old in pairs) <= 1
        assert strange.written[0] == "Call"
        assert [new[-1] for new, old in pairs if old[-1] in ",."] == [",", "."]


def test_nothing_said_has_a_digit_and_each_word_is_said():
    for sentence in itertools.islice(sentences(2), 2000):
        assert not any(letter.isdigit() for word in sentence.said for letter in word)
        assert len(sentence.written) == len(sentence.said)
        assert all(sentence.written)
        assert all(sentence.said)


def test_vocabulary_has_whispers_layout():
    tokenizer = build_tokenizer()
    names = "endoftext startoftranscript en translate transcribe startoflm startofprev nospeech notimestamps".split()
    assert tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names]) == list(
        range(END_ID, END_ID + 9)
    )
    assert tokenizer.all_special_ids[-1] == END_ID + 8  # what transformers finds the first timestamp by
    assert tokenizer.convert_ids_to_tokens([END_ID + 9, END_ID + 10, VOCAB_SIZE - 1]) == [
        "<|0.00|>",
        "<|0.02|>",
        "<|30.00|>",
    ]
    for sentence in itertools.islice(sentences(3), 200):
        ids = tokenizer.encode(" " + sentence.text, add_special_tokens=False)
        assert max(ids) < END_ID
        assert tokenizer.decode(ids) == " " + sentence.text


def test_no_token_holds_two_digits(bpe):
    assert not [
        token for token in bpe.get_vocab() if sum(letter.isdigit() for letter in token) and len(token) > 1
    ]


def test_words_that_run_together_share_their_time_by_letters():
    spans = word_spans(("in", "the", "house"), [(0, 100), (7, 900)], 2000)
    assert spans == [
        (100, 442),
        (442, 900),
        (900, 2000),
    ]  # 3 and 4 of the 7 letters and spaces before "house"


def test_tokens_of_a_clip_lie_in_their_words(bpe):
    sentence = parse("Set a timer for 58|fifty_eight minutes.")
    num_samples = 12 * TICK * len(sentence.said)
    bounds = np.arange(0, num_samples + 1, 12 * TICK).tolist()
    audio = np.full(num_samples, 1000, np.int16)
    clip = make_clip(sentence, Spoken(audio, list(itertools.pairwise(bounds))), bpe)
    assert clip.ticks == 72
    text = [bpe.decode([token]) for token in clip.tokens]
    first = text.index("5")
    assert (
        48 <= clip.spans[first][0] < clip.spans[first][1] <= clip.spans[first + 1][0] < 60
    )  # the fifth word
    starts = [start for start, _ in clip.spans]
    assert starts == sorted(starts)
    assert all(start < end <= clip.ticks for start, end in clip.spans)


def test_word_errors():
    assert word_errors("a b c d".split(), "a x c".split()) == 2
    assert word_errors([], ["a"]) == 1
    rates = error_rates([("Turn on, please.", "turn on please"), ("Yes.", "Yes.")])
    assert (rates["wer"], rates["wer_normalized"], rates["exact"]) == (0.75, 0.0, 0.5)


@needs_espeak
def test_espeak_says_words_where_it_reports_them(bpe):
    for clip in itertools.islice(clips("test", bpe), 24):
        starts = [start for start, _ in clip.word_spans]
        assert starts == sorted(starts)
        assert starts[0] >= 0
        assert clip.word_spans[-1][1] <= clip.ticks + 1
        assert 20 < clip.ticks < 700
        assert np.abs(clip.audio.astype(np.int32)).max() > 5000
        assert bpe.decode(clip.tokens).strip() == clip.text


@needs_espeak
def test_streams_do_not_disturb_each_other(bpe):
    """Voices and texts, that is: espeak's noise goes on from clip to clip, so samples differ."""
    alone = [(clip.text, clip.ticks) for clip in itertools.islice(clips("a", bpe), 3)]
    first, second = clips("a", bpe), clips("b", bpe, heldout=True)
    for text, ticks in alone:
        clip = next(first)
        assert clip.text == text
        assert abs(clip.ticks - ticks) <= 1
        next(second)


@needs_espeak
def test_chunks_hold_the_clips(bpe):
    made = list(itertools.islice(clips("a", bpe), 8))
    chunk = next(chunks(iter(made)))
    assert chunk.num_clips == len(made)
    for row, clip in enumerate(made):
        start, ticks = chunk.starts[row], chunk.ticks[row]
        assert np.array_equal(chunk.audio[start * TICK : (start + ticks) * TICK], clip.audio)
        assert chunk.tokens[row, : chunk.counts[row]].tolist() == clip.tokens
        assert chunk.frame_tokens[start + clip.spans[2][0]] == clip.tokens[2] + 1


@needs_espeak
def test_recordings_with_long_silences_hold_sentences_where_they_say(bpe):
    speaker = Speaker(SimpleNamespace(tokenizer=SimpleNamespace(backend_tokenizer=bpe)), "test")
    silences = []
    for recording in (speaker.apart(29.5) for _ in range(20)):
        assert len(recording.audio) < SAMPLES
        noisy = with_noisy_silences(recording, 1e-3, seed=0)
        assert len(noisy.audio) == SAMPLES
        now = 0
        for _, start, end in recording.sentences:
            first, last = round(start * RATE), round(end * RATE)
            assert not recording.audio[now:first].any()
            assert np.abs(recording.audio[first:last]).max() > 0.1
            assert np.array_equal(noisy.audio[first:last], recording.audio[first:last])
            if first > now:
                assert noisy.audio[now:first].std() == pytest.approx(1e-3, rel=0.1)
            silences.append((first - now) / RATE)
            now = last
    assert sum(silence > 6 for silence in silences) > 10
    assert max(silences) <= 25


def test_sentence_text_joins_words():
    assert Sentence(("Yes,", "Ben."), ("Yes,", "Ben.")).text == "Yes, Ben."
