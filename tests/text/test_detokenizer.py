"""Field report G-01: characters that are split over ids, and spaces that depend on their neighbours."""

import random

import pytest
from text_tokenizers import byte_fallback, byte_level, metaspace, single_bytes

from core_runner.text import IncrementalDetokenizer, Tokenizer

BUILDERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
BROKEN = "\ufffd"
WORDS = ["naïve café", "👩🏽", "שלום", "你好世界", "a 你", "é b"]


@pytest.fixture(scope="module", params=BUILDERS)
def tokenizer(request):
    return Tokenizer(BUILDERS[request.param]())


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def byte_tokenizer(request):
    return Tokenizer(BUILDERS[request.param]())


def stream(detokenizer, ids, rng=None):
    """Deltas of ids, pushed one by one or in random pieces."""
    deltas, at = [], 0
    while at < len(ids):
        step = rng.randint(1, 4) if rng else 1
        deltas.append(detokenizer.push(ids[at : at + step]))
        at += step
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("skip", [True, False])
def test_deltas_join_to_the_decoded_whole_for_any_ids(tokenizer, skip):
    rng = random.Random(0)
    for _ in range(150):
        ids = [rng.randrange(len(tokenizer) + 3) for _ in range(rng.randint(0, 40))]
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        joined = "".join(stream(detokenizer, ids, rng))
        known = [i for i in ids if i < len(tokenizer)]
        assert joined == tokenizer.hf.decode(known, skip_special_tokens=skip)
        assert detokenizer.text == joined


@pytest.mark.parametrize("skip", [True, False])
def test_runs_of_bytes_and_specials_join_too(byte_tokenizer, skip):
    rng = random.Random(1)
    hf = byte_tokenizer.hf
    parts = [single_bytes(hf, word) for word in WORDS] + [
        [hf.bos_token_id],
        hf.encode(" the"),
        hf.encode(" "),
    ]
    for _ in range(150):
        ids = [i for part in rng.choices(parts, k=6) for i in part][: rng.randint(1, 60)]
        joined = "".join(stream(IncrementalDetokenizer(byte_tokenizer, skip), ids, rng))
        assert joined == hf.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("word", WORDS)
def test_a_whole_character_never_shows_as_broken(byte_tokenizer, word):
    deltas = stream(IncrementalDetokenizer(byte_tokenizer), single_bytes(byte_tokenizer.hf, word))
    assert not any(BROKEN in delta for delta in deltas)
    assert "".join(deltas) == word


def test_text_comes_out_as_soon_as_its_characters_are_whole():
    tokenizer = Tokenizer(byte_level())
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.push([i]) for i in single_bytes(tokenizer.hf, "a你b")]
    assert deltas == ["a", "", "", "你", "b"]


def test_ids_that_end_inside_a_character_break_only_the_last_delta(byte_tokenizer):
    ids = single_bytes(byte_tokenizer.hf, "x你")[:-1]
    *deltas, last = stream(IncrementalDetokenizer(byte_tokenizer), ids)
    assert not any(BROKEN in delta for delta in deltas)
    assert BROKEN in last
    assert "".join([*deltas, last]) == byte_tokenizer.hf.decode(ids)


def test_a_space_after_an_incomplete_character_raises_nothing(byte_tokenizer):
    ids = [*single_bytes(byte_tokenizer.hf, "你")[:2], *single_bytes(byte_tokenizer.hf, " b")]
    assert "".join(stream(IncrementalDetokenizer(byte_tokenizer), ids)) == byte_tokenizer.hf.decode(ids)


def test_twenty_streams_do_not_share_anything(byte_tokenizer):
    words = [f"{WORDS[n % len(WORDS)]} {n}" for n in range(20)]
    streams = [(IncrementalDetokenizer(byte_tokenizer), single_bytes(byte_tokenizer.hf, w)) for w in words]
    for at in range(max(len(ids) for _, ids in streams)):
        for detokenizer, ids in streams:
            detokenizer.push(ids[at : at + 1])
    for (detokenizer, _), word in zip(streams, words, strict=True):
        detokenizer.finish()
        assert detokenizer.text == word


def test_special_tokens_are_skipped_or_kept():
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.hf.encode("<s>cat<x> mat</s>")
    assert "".join(stream(IncrementalDetokenizer(tokenizer), ids)) == "cat mat"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, False), ids)) == "<s>cat<x> mat</s>"


@pytest.mark.parametrize("build", [byte_fallback, metaspace])
def test_ids_without_text_keep_the_space_of_the_next_word(build):
    tokenizer = Tokenizer(build())
    the, cat, empty = tokenizer.hf.convert_tokens_to_ids(["▁the", "▁cat", ""])
    assert tokenizer.decode([empty]) == ""
    deltas = stream(IncrementalDetokenizer(tokenizer), [the, empty, cat, empty, empty, the])
    assert "".join(deltas) == "the cat the"


def test_a_transformers_tokenizer_is_accepted_as_it_is():
    hf = byte_level()
    assert "".join(stream(IncrementalDetokenizer(hf), hf.encode("the cat"))) == "the cat"


class CountingTokenizer(Tokenizer):
    def __init__(self, hf):
        super().__init__(hf)
        self.decoded = 0

    def decode(self, token_ids, *, skip_special_tokens=False):
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("kind", ["text", "bad_bytes", "specials", "characters"])
def test_the_cost_of_an_id_does_not_grow_with_the_text(build, kind):
    tokenizer = CountingTokenizer(build())
    hf, n = tokenizer.hf, 3000
    byte = hf.convert_tokens_to_ids(f"<0x{0x80:02X}>" if build is byte_fallback else "Ģ")
    ids = {
        "text": hf.encode("the cat sat. ") * n,
        "bad_bytes": [byte if byte is not None else 0] * n,
        "specials": [hf.bos_token_id] * n,
        "characters": hf.encode("你好") * n,
    }[kind][:n]
    deltas = stream(IncrementalDetokenizer(tokenizer), ids)
    assert "".join(deltas) == hf.decode(ids, skip_special_tokens=True)
    assert tokenizer.decoded <= 60 * n
